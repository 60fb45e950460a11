"""What the assets of one recipe are called, and the settings that all of them share."""

import hashlib

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


def pool_of(asset: str) -> str | None:
    """The pool whose slots bound how many steps of the asset run at a time; None where nothing does."""
    return GPU_POOL if asset in _USING_GPU else None


def code_version(recipe: Recipe, asset: str) -> str:
    """12 hex digits over what of the recipe decides the asset's content beside its inputs."""
    settings = recipe.model_dump_json(include=_DECIDED_BY[asset])
    return hashlib.sha256(settings.encode("utf-8")).hexdigest()[:12]
