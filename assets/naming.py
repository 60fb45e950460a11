"""What the assets of one recipe are called, and the settings that all of them share."""

import hashlib
from typing import TypedDict

from dagster import AssetKey

from pipeline.recipe import Recipe

TABLES_RESOURCE = "tables"
LAUNCHER_RESOURCE = "launcher"

JOBS = {
    "cache": "Brings tables, latents and text embeddings up to date.",
    "train": "Brings the cache up to date, then trains the LoRA.",
}
"""What a recipe's jobs do: they are called `<recipe>_cache` and `<recipe>_train`."""

RECIPE_TAG = "latentline/recipe"
"""On each run of a recipe's jobs, so that schedule and sensor see whether one is under way."""

GPU_POOL = "gpu"
"""Steps that may hold a model; `.dagster/dagster.yaml` lets one at a time run."""

_USING_GPU = {"vae_latents", "text_embeddings", "trained_lora"}

_DECIDED_BY: dict[str, set[str]] = {
    "raw_images": {"datasets"},
    "validated_dataset": {"datasets"},
    "aspect_buckets": {"buckets", "model"},
    "vae_latents": {"latents", "model"},
    "text_embeddings": {"text", "model", "training"},
    "trained_lora": {"training", "accelerate", "text", "model", "datasets"},
}
"""Sections of the recipe that decide an asset's content beside its inputs: its code version."""


def asset_key(recipe: Recipe, asset: str) -> AssetKey:
    """`<recipe>/<asset>`."""
    return AssetKey([recipe.name, asset])


class AssetSettings(TypedDict):
    """Arguments of `@asset`."""

    key: AssetKey
    group_name: str
    description: str
    io_manager_key: str
    code_version: str
    pool: str | None


def asset_settings(recipe: Recipe, asset: str, description: str) -> AssetSettings:
    """The arguments of `@asset` that follow from recipe and name."""
    return {
        "key": asset_key(recipe, asset),
        "group_name": recipe.name,
        "description": description,
        "io_manager_key": TABLES_RESOURCE,
        "code_version": _code_version(recipe, asset),
        "pool": GPU_POOL if asset in _USING_GPU else None,
    }


def _code_version(recipe: Recipe, asset: str) -> str:
    settings = recipe.model_dump_json(include=_DECIDED_BY[asset])
    return hashlib.sha256(settings.encode("utf-8")).hexdigest()[:12]
