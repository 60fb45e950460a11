"""Entry modules that encode, and which of them a run will surely launch.

A run decides this before it imports anything large, so this module imports little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.cache.packs import PACKS
from pipeline.storage.addresses import Url

if TYPE_CHECKING:
    from pipeline.cache.entry_format import Kind
    from pipeline.recipe import Recipe

EVALUATION_MODULE = "pipeline.evaluation.worker"
"""Entry module that draws and scores pictures. Its processes are on the machine of the step."""

DIAGNOSIS_MODULE = "pipeline.diagnosis.worker"
"""Entry module that measures losses and gradients with the base model."""

CAPTIONS_MODULE = "pipeline.captions.worker"
"""Entry module that captions images."""

WORKERS: dict[Kind, str] = {
    "latents": "pipeline.vae_latents.worker",
    "text": "pipeline.text_embeddings.worker",
    # Masks need no model, so this one is not launched.
    "masks": "pipeline.vae_latents.masks",
    "pictures": EVALUATION_MODULE,
    "features": EVALUATION_MODULE,
    "diagnoses": DIAGNOSIS_MODULE,
    "influences": DIAGNOSIS_MODULE,
    "captions": CAPTIONS_MODULE,
}
"""Module that encodes each kind."""


def surely_launched(recipe: Recipe) -> list[str]:
    """Return the modules of `WORKERS` that encode for the recipe unless a gate closes.

    These are the ones for kinds of which the cache has no entry at all; other entries may be missing too.
    """
    cache_dir = recipe.cache_dir
    if isinstance(cache_dir, Url):
        return []
    kinds: tuple[Kind, ...] = ("latents", "text")
    return [
        WORKERS[kind]
        for kind in kinds
        if not (cache_dir / kind).is_dir() and not (cache_dir / PACKS / kind).is_dir()
    ]
