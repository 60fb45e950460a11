"""Names that assets, jobs, resources and automation of a recipe share."""

from dagster import AssetKey

from pipeline.recipe import Recipe
from resources.terminal_log import TERMINAL_LOGGER

TABLES_RESOURCE = "tables"
LAUNCHER_RESOURCE = "launcher"

AFTER_CACHE = ("diagnosis", "trained_lora", "evaluation", "sweep")
"""Assets that the cache job leaves out."""

RECIPE_TAG = "latentline/recipe"
"""Tag on each run of a recipe's jobs, by which the schedule and the sensor find runs in progress."""

ATTEMPT_TAG = "latentline/attempt"
"""Tag on each run that the sensor starts, such as "2 of 4"."""

# Undocumented: a run of selected assets has no other mark.
IMPLICIT_JOB = "__ASSET_JOB"
"""Dagster's job of assets that somebody selected, in the UI or with `dg launch --assets`."""

GPU_POOL = "gpu"
"""Pool of the steps that may load a model; `.dagster/dagster.yaml` runs one of them at a time. With a pool
per machine, the machine's name is appended (assets/deployment.py)."""

# It logs the messages of the stages without Dagster's events, so that a failure is printed once, in the
# summary.
DEFAULT_RUN_CONFIG = {"loggers": {TERMINAL_LOGGER: {}}}
"""Configuration of runs that have none; the configuration of a run replaces it."""


def asset_key(recipe: Recipe, asset: str) -> AssetKey:
    """Return `<recipe>/<asset>`."""
    return AssetKey([recipe.name, asset])
