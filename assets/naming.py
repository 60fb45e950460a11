"""What the assets of one recipe are called, and the settings that all of them share."""

import hashlib
from typing import Any

from dagster import AssetKey

from pipeline.recipe import Recipe
from pipeline.versions import CAPTIONS_VERSION, LOOK_VERSION, PREPROCESSING_VERSION, TRAINING_VERSION

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

_DECIDED_BY: dict[str, dict[str, Any]] = {
    "raw_images": {"datasets": True, "checks": {"max_image_pixels"}},
    "validated_dataset": {"datasets": True, "checks": {"max_image_pixels", "near_duplicate_bits"}},
    "aspect_buckets": {"buckets": True, "model": True},
    "vae_latents": {"latents": True, "model": True},
    "text_embeddings": {"text": True, "model": True, "training": True},
    "trained_lora": {
        **dict.fromkeys(("training", "accelerate", "text", "model", "datasets"), True),
        "buckets": {"underfilled"},
    },
}
"""Sections of the recipe, or keys of one, that decide an asset's content beside its inputs."""

_VERSIONS: dict[str, tuple[object, ...]] = {
    "validated_dataset": (PREPROCESSING_VERSION, LOOK_VERSION, CAPTIONS_VERSION),
    "vae_latents": (PREPROCESSING_VERSION,),
    "trained_lora": (TRAINING_VERSION,),
}
"""Of the code that does."""


def asset_key(recipe: Recipe, asset: str) -> AssetKey:
    """`<recipe>/<asset>`."""
    return AssetKey([recipe.name, asset])


def pool_of(asset: str) -> str | None:
    """The pool whose slots bound how many steps of the asset run at a time; None where nothing does."""
    return GPU_POOL if asset in _USING_GPU else None


def code_version(recipe: Recipe, asset: str) -> str:
    """12 hex digits over what of the recipe and of the code decides the asset's content beside its inputs."""
    settings = recipe.model_dump_json(include=_DECIDED_BY[asset]) + repr(_VERSIONS.get(asset, ()))
    return hashlib.sha256(settings.encode("utf-8")).hexdigest()[:12]
