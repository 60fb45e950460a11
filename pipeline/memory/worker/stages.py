"""Memory of every stage of a recipe, against a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
import torch

from pipeline.errors import ModelError
from pipeline.memory.gpus import gpu_named
from pipeline.memory.job import CaptionerJob, MemoryForecast, MemoryJob, StageMemory
from pipeline.memory.worker.captioning import caption_memory
from pipeline.memory.worker.changes import cheapest_change
from pipeline.memory.worker.encoding import latents_bytes, text_memory
from pipeline.memory.worker.previews import previews_bytes
from pipeline.memory.worker.times import computed_times
from pipeline.models.worker.family import load_family
from pipeline.processes.worker.devices import emulates_bf16
from pipeline.trained_lora.worker.memory.resident_blocks import RESERVED_BYTES, largest_size, most_resident
from pipeline.trained_lora.worker.memory.training import TrainingForecast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeline.images.geometry import Size
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import Recipe
    from pipeline.trained_lora.worker.memory.training import Variant

_LATENTS_NOTE = "smaller batches, then tiles, if memory runs out"

_PREVIEWS_NOTE = "tiles in bfloat16 if memory runs out"


def forecast_stages(job: MemoryJob, phase: Callable[[str], None] = lambda text: None) -> MemoryForecast:
    """Return the memory of the job's recipe, and its times if the GPU's specifications are here.

    `phase` receives what is computed.

    Raises:
        ModelError: The model's code does not run on the meta device.
    """
    # Every process of a job imports the same libraries as this one.
    process_bytes = psutil.Process().memory_info().rss
    family = load_family(job.model_folder, job.component_folders)
    recipe, size = job.recipe, largest_size(job.recipe)
    training = TrainingForecast(family, recipe, size)
    card, card_bytes = _card(job)
    usable_bytes = None if card_bytes is None else card_bytes - RESERVED_BYTES
    vae_dtype = family.vae_compute_dtype(recipe.latents.compute_dtype)
    text_dtypes = family.text_compute_dtypes(recipe.text.compute_dtype)
    phase("computing the memory of each stage")
    try:
        vae, latents_device = latents_bytes(family, size, vae_dtype)
        text = text_memory(family, text_dtypes, offload=recipe.text.offload, card_bytes=card_bytes)
        offload = _offload(training, recipe, usable_bytes)
        variant = replace(training.variant, offload=offload)
        trained = training.memory(variant)
        previews = _preview_stage(family, training, variant, process_bytes + trained.host, recipe, size)
    except (RuntimeError, NotImplementedError) as err:
        raise ModelError(
            f"memory cannot be forecast for {family.spec.name}: {str(err).partition(chr(10))[0]}",
            where=str(job.model_folder),
            fix="start the training; if memory runs out, the error names settings that need less",
        ) from err

    gpu, times = gpu_named(card), None
    if gpu is not None:
        phase("counting the operations of a training step")
        times = computed_times(family, recipe, training, size, gpu, offload=offload)
    fits = usable_bytes is None or trained.device <= usable_bytes
    return MemoryForecast(
        stages=(
            *_caption_stage(job, process_bytes, usable_bytes),
            StageMemory("encode latents", latents_device, process_bytes + vae, _LATENTS_NOTE),
            StageMemory(
                "encode text", text.device, process_bytes + text.host, _text_note(text_dtypes, text.notes)
            ),
            StageMemory(
                "train",
                trained.device,
                process_bytes + trained.host,
                "; ".join(
                    filter(None, [_offload_note(training, recipe, offload), _precision_note(job, training)])
                ),
            ),
            *previews,
        ),
        card=card,
        card_bytes=card_bytes,
        usable_bytes=usable_bytes,
        change=None if fits or usable_bytes is None else cheapest_change(training, recipe, usable_bytes),
        machine_bytes=machine_bytes(),
        times=times,
    )


def _preview_stage(
    family: WorkerFamily, training: TrainingForecast, variant: Variant, host: int, recipe: Recipe, size: Size
) -> list[StageMemory]:
    """Return the stage of the previews; empty if the training draws none."""
    if recipe.training.sample_every == 0:
        return []
    vae, device = previews_bytes(family, recipe, training, variant, size)
    return [StageMemory("draw previews", device, host + vae, _PREVIEWS_NOTE)]


def _caption_stage(job: MemoryJob, process_bytes: int, usable_bytes: int | None) -> list[StageMemory]:
    """Return the stage of the captioning model that needs most memory; empty without one."""
    stages: list[StageMemory] = []
    for captioner in job.captioners:
        memory = caption_memory(captioner, quantize=captioner.captions.quantize)
        notes = [memory.note] if memory.note else []
        if usable_bytes is not None and memory.device > usable_bytes:
            notes.append(_smaller_captioner(captioner, usable_bytes))
        host = process_bytes + memory.host
        stages.append(StageMemory("write captions", memory.device, host, "; ".join(notes)))
    return sorted(stages, key=lambda stage: stage.device_bytes)[-1:]


def _smaller_captioner(job: CaptionerJob, usable_bytes: int) -> str:
    """Return the first setting with which a captioning model fits."""
    changed: list[str] = []
    if job.dtype == "float32":
        changed.append("captions.dtype: bfloat16")
        job = replace(job, dtype="bfloat16")
        if caption_memory(job, quantize=job.captions.quantize).device <= usable_bytes:
            return f"it does not fit, set {changed[0]}"
    if job.captions.quantize is None:
        changed.append("captions.quantize: int8")
        if caption_memory(job, quantize="int8").device <= usable_bytes:
            return f"it does not fit, set {' and '.join(changed)}"
    return "it does not fit, lower captions.resolution or use a smaller model"


def _offload(training: TrainingForecast, recipe: Recipe, usable_bytes: int | None) -> Literal["none"] | int:
    if recipe.training.offload != "auto" or usable_bytes is None:
        return training.variant.offload
    return most_resident(training, training.variant, usable_bytes)[0]


def _offload_note(training: TrainingForecast, recipe: Recipe, offload: Literal["none"] | int) -> str:
    if recipe.training.offload != "auto":
        return ""
    kept = training.num_blocks if offload == "none" else offload
    return f"training.offload: auto keeps {kept} of {training.num_blocks} blocks on the GPU"


def _precision_note(job: MemoryJob, training: TrainingForecast) -> str:
    is_own_gpu = job.card_bytes is None and torch.cuda.is_available()
    if not (is_own_gpu and training.variant.mixed_precision == "bf16" and emulates_bf16("cuda:0")):
        return ""
    return "this GPU has no bf16 in hardware, and training refuses it: set accelerate.mixed_precision: fp16"


def _text_note(dtypes: Mapping[str, str], streaming: Sequence[str]) -> str:
    is_float32 = set(dtypes.values()) == {"float32"}
    return "; ".join([*streaming, *(["text.compute_dtype: bfloat16 takes half of it"] if is_float32 else [])])


def machine_bytes(limit_file: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Return the memory of this machine, or the limit of its container if that is lower."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = limit_file.read_text(encoding="ascii").strip()
    except OSError:
        return total
    # With cgroup v2, a container without a limit has "max" in this file.
    return min(total, int(limit)) if limit.isdecimal() else total


def _card(job: MemoryJob) -> tuple[str | None, int | None]:
    if job.card_bytes is not None:
        return job.card or f"a GPU of {job.card_bytes / 2**30:g} GB", job.card_bytes
    if not torch.cuda.is_available():
        return None, None
    return torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
