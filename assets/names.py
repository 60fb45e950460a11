"""Names that assets, jobs, resources and automation of a recipe share."""

from dagster import AssetKey

from pipeline.recipe import Recipe
from resources.terminal_log import TERMINAL_LOGGER

TABLES_RESOURCE = "tables"
LAUNCHER_RESOURCE = "launcher"

AFTER_CACHE = ("diagnosis", "trained_lora", "evaluation", "sweep")
"""Assets that the cache job leaves out."""

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
