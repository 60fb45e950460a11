"""The code version of an asset: the settings and algorithms that decide its content next to its inputs."""

import hashlib
import json
from typing import Any

from pipeline.recipe import Recipe, project_root
from pipeline.recipe.captions import DECIDES_TEXT
from pipeline.versions import (
    CAPTIONER_VERSION,
    CAPTIONS_VERSION,
    DIAGNOSIS_VERSION,
    FEATURES_VERSION,
    LOOK_VERSION,
    PICTURES_VERSION,
    PREPROCESSING_VERSION,
    TRAINING_VERSION,
)

_RECIPE_FIELDS: dict[str, dict[str, Any]] = {
    "raw_images": {"datasets": True, "checks": {"max_image_pixels", "max_file_bytes"}},
    "validated_dataset": {
        "datasets": True,
        "checks": {"max_image_pixels", "max_file_bytes", "max_decode_bytes", "near_duplicate_bits"},
    },
    "aspect_buckets": {"buckets": True, "model": True},
    "vae_latents": {"latents": True, "model": True},
    # The prompts of previews are encoded too, and default previews use the empty caption.
    "text_embeddings": {"text": True, "model": True, "training": {"sample_prompts", "sample_every"}},
    "trained_lora": {
        **dict.fromkeys(("training", "accelerate", "text", "model", "datasets"), True),
        "buckets": {"underfilled"},
    },
    "captions": {"datasets": True, "latents": {"background"}, "checks": {"max_file_bytes"}},
    "diagnosis": {"diagnosis": True, "model": True, "accelerate": {"mixed_precision"}},
    "evaluation": {"evaluation": True},
    "sweep": {
        **dict.fromkeys(("sweep", "evaluation", "training", "accelerate", "text", "model", "datasets"), True),
        "buckets": True,
        "latents": True,
    },
}
"""Recipe sections, or keys of a section, that decide each asset's content in addition to its inputs."""


_WITHOUT_CONTEXT = ("aspect_buckets", "vae_latents", "text_embeddings")
"""Assets that read the base model, but never its context LoRA."""

_NOT_SCANNED: dict[str, Any] = {
    **dict.fromkeys(("limit", "duplicates", "validation_fraction"), True),
    **dict.fromkeys(("repeats", "weight", "role", "slider", "loss_weight"), True),
    **dict.fromkeys(("resolution", "resolutions", "flip", "caption_dropout"), True),
    "captions": set(DECIDES_TEXT),
}
"""Keys of datasets that later stages use, and that do not decide which files raw_images lists."""

ALGORITHM_VERSIONS: dict[str, tuple[object, ...]] = {
    "validated_dataset": (PREPROCESSING_VERSION, LOOK_VERSION, CAPTIONS_VERSION),
    "vae_latents": (PREPROCESSING_VERSION,),
    "trained_lora": (TRAINING_VERSION,),
    "captions": (CAPTIONER_VERSION, PREPROCESSING_VERSION),
    "diagnosis": (DIAGNOSIS_VERSION,),
    "evaluation": (PICTURES_VERSION, FEATURES_VERSION),
    "sweep": (TRAINING_VERSION, PICTURES_VERSION, FEATURES_VERSION),
}
"""Versions of the algorithms that decide each asset's content."""

_DATASET_FIELDS = {
    "aspect_buckets": {"resolution", "resolutions"},
    "vae_latents": {"flip"},
    "text_embeddings": {"caption_dropout"},
}
"""Keys of datasets that decide an asset in place of its own section."""

_SEEN_BY_TEXT_ENCODER: tuple[dict[str, Any], tuple[object, ...]] = (
    {"latents": {"background"}},
    (PREPROCESSING_VERSION,),
)
"""Further recipe fields and versions that decide text_embeddings if a text encoder may see references."""


def code_version(recipe: Recipe, asset: str) -> str:
    """Return 12 hex digits over the recipe fields and algorithm versions that decide the asset's content."""
    fields, versions = _RECIPE_FIELDS[asset], ALGORITHM_VERSIONS.get(asset, ())
    # The base model, which is not read here, decides whether its text encoder sees references. So every
    # recipe with references counts.
    if asset == "text_embeddings" and _has_references(recipe):
        more_fields, more_versions = _SEEN_BY_TEXT_ENCODER
        fields, versions = fields | more_fields, versions + more_versions
    # Absent in recipes without such a key, so that their assets stay in sync.
    own = _DATASET_FIELDS.get(asset, set[str]())
    if any(getattr(each, key) not in (None, ()) for each in recipe.datasets for key in own):
        fields = {**fields, "datasets": {"__all__": own}}
    unused: dict[str, Any] = {"datasets": {"__all__": _NOT_SCANNED}} if asset == "raw_images" else {}
    if recipe.model.context_lora is None or asset in _WITHOUT_CONTEXT:
        unused = {**unused, "model": {"context_lora"}}
    settings = recipe.model_dump_json(include=fields, exclude=unused)
    # A copy of the project in another folder has the same assets.
    inside = json.dumps(f"{project_root()}/", ensure_ascii=False).removesuffix('"')
    settings = settings.replace(inside, '"') + repr(versions)
    return hashlib.sha256(settings.encode("utf-8")).hexdigest()[:12]


def _has_references(recipe: Recipe) -> bool:
    return any(each.references for each in (*recipe.datasets, *recipe.training.sample_prompts))
