"""Code versions: what Dagster compares to mark an asset as stale after a change of the recipe or the code."""

import hashlib
from typing import Any

from pipeline.recipe import Recipe
from pipeline.versions import CAPTIONS_VERSION, LOOK_VERSION, PREPROCESSING_VERSION, TRAINING_VERSION

_RECIPE_FIELDS: dict[str, dict[str, Any]] = {
    "raw_images": {"datasets": True, "checks": {"max_image_pixels", "max_file_bytes"}},
    "validated_dataset": {
        "datasets": True,
        "checks": {"max_image_pixels", "max_file_bytes", "max_decode_bytes", "near_duplicate_bits"},
    },
    "aspect_buckets": {"buckets": True, "model": True},
    "vae_latents": {"latents": True, "model": True},
    "text_embeddings": {"text": True, "model": True, "training": True},
    "trained_lora": {
        **dict.fromkeys(("training", "accelerate", "text", "model", "datasets"), True),
        "buckets": {"underfilled"},
    },
}
"""Recipe sections, or keys of a section, that decide each asset's content in addition to its inputs."""

ALGORITHM_VERSIONS: dict[str, tuple[object, ...]] = {
    "validated_dataset": (PREPROCESSING_VERSION, LOOK_VERSION, CAPTIONS_VERSION),
    "vae_latents": (PREPROCESSING_VERSION,),
    "trained_lora": (TRAINING_VERSION,),
}
"""Versions of the algorithms that decide each asset's content."""


_SEEN_BY_TEXT_ENCODER: tuple[dict[str, Any], tuple[object, ...]] = (
    {"latents": {"background"}},
    (PREPROCESSING_VERSION,),
)
"""Further recipe fields and versions that decide text_embeddings if a text encoder may see references."""


def code_version(recipe: Recipe, asset: str) -> str:
    """Return 12 hex digits over the recipe fields and algorithm versions that decide the asset's content.

    The base model decides whether its text encoder sees references. It is not read here, so every recipe with
    references counts as one whose text encoder does.
    """
    fields, versions = _RECIPE_FIELDS[asset], ALGORITHM_VERSIONS.get(asset, ())
    if asset == "text_embeddings" and _has_references(recipe):
        more_fields, more_versions = _SEEN_BY_TEXT_ENCODER
        fields, versions = fields | more_fields, versions + more_versions
    settings = recipe.model_dump_json(include=fields) + repr(versions)
    return hashlib.sha256(settings.encode("utf-8")).hexdigest()[:12]


def _has_references(recipe: Recipe) -> bool:
    return any(each.references for each in (*recipe.datasets, *recipe.training.sample_prompts))
