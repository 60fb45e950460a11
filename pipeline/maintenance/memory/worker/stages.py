"""Memory of every stage of a recipe, against a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import torch

from pipeline.errors import ModelError
from pipeline.images.geometry import placement_of
from pipeline.maintenance.memory.job import MemoryForecast, MemoryJob, StageMemory
from pipeline.maintenance.memory.worker.changes import cheapest_change
from pipeline.maintenance.memory.worker.encoding import latents_bytes, text_bytes
from pipeline.maintenance.memory.worker.training import TrainingForecast
from pipeline.models.worker.family import load_family

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.images.geometry import Size
    from pipeline.recipe import Recipe

RESERVED_BYTES = 2**30
"""Memory of a GPU that tensors cannot use: CUDA's context, workspaces and unused parts of allocated blocks.

An assumption; it is not measured.
"""

_LATENTS_NOTE = "smaller batches, then tiles, if memory runs out"


def forecast_stages(job: MemoryJob) -> MemoryForecast:
    """Return the memory of the job's recipe.

    Raises:
        ModelError: The model's code does not run on the meta device.
    """
    # Every process of a job imports the same libraries as this one.
    process_bytes = psutil.Process().memory_info().rss
    family = load_family(job.model_folder, job.component_folders)
    recipe, size = job.recipe, largest_size(job.recipe)
    training = TrainingForecast(family, recipe, size)
    vae_dtype = family.vae_compute_dtype(recipe.latents.compute_dtype)
    text_dtypes = family.text_compute_dtypes(recipe.text.compute_dtype)
    try:
        vae, latents_device = latents_bytes(family, size, vae_dtype)
        encoder, text_device = text_bytes(family, text_dtypes)
        trained = training.memory(training.variant)
    except (RuntimeError, NotImplementedError) as err:
        raise ModelError(
            f"memory cannot be forecast for {family.name}: {str(err).partition(chr(10))[0]}",
            where=str(job.model_folder),
            fix="start the training; if memory runs out, the error names settings that need less",
        ) from err

    card, card_bytes = _card(job)
    usable_bytes = None if card_bytes is None else card_bytes - RESERVED_BYTES
    fits = usable_bytes is None or trained.device <= usable_bytes
    return MemoryForecast(
        stages=(
            StageMemory("encode latents", latents_device, process_bytes + vae, _LATENTS_NOTE),
            StageMemory("encode text", text_device, process_bytes + encoder, _text_note(text_dtypes)),
            StageMemory("train", trained.device, process_bytes + trained.host),
        ),
        card=card,
        card_bytes=card_bytes,
        usable_bytes=usable_bytes,
        change=None if fits or usable_bytes is None else cheapest_change(training, recipe, usable_bytes),
    )


def _text_note(dtypes: Mapping[str, str]) -> str:
    is_float32 = set(dtypes.values()) == {"float32"}
    return "text.compute_dtype: bfloat16 takes half of it" if is_float32 else ""


def largest_size(recipe: Recipe) -> Size:
    """Return the bucket with the largest area."""
    sizes = [size for buckets in placement_of(recipe.buckets).sets for size in buckets.sizes]
    return max(sizes, key=lambda size: size.height * size.width)


def _card(job: MemoryJob) -> tuple[str | None, int | None]:
    """Return (name, bytes) of the GPU to compare with."""
    if job.card_bytes is not None:
        return f"a GPU of {job.card_bytes / 2**30:g} GB", job.card_bytes
    if not torch.cuda.is_available():
        return None, None
    return torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
