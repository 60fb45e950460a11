"""Generate the tables in docs/hardware.md: `python -m tools.docs.hardware_page`, some minutes.

Memory is computed as in `latentline plan`, for the configurations of published models in `bench.gpu`. The
size of cache entries follows from their shapes, and times from `step_times`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gpu.configurations import PUBLISHED, Published
from pipeline.images.geometry import Size
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.recipe import Recipe
from pipeline.trained_lora.worker.memory.training import TrainingForecast
from tools.docs.step_times import step_line, timing_lines
from tools.docs.streaming import streaming_lines, training_recipe

PAGE = Path("docs/hardware.md")
MARKERS = "<!-- {name}: {edge} -->"

GIB = 2**30
CARDS_GB = (12, 16, 24, 48, 80)

SMALL_CARDS_GB = (8, 12, 16, 24)
"""Cards in the table of proposals."""

LARGE_MODELS = ("Ideogram 4", "FLUX.1 dev", "Krea 2", "HiDream I1", "Qwen-Image", "FLUX.2 dev")
"""Models in the table of proposals: the six largest."""

RESOLUTIONS = {"Stable Diffusion 1.5": 512, "Stable Diffusion 2.1": 768, "Wan 2.1 1.3B": 640}
"""Resolutions of models that were trained on smaller images than 1024 px."""

SETTINGS = ("bf16", "checkpointing", "int8", "nf4")
"""Settings of a training, each with less memory than the one before; the last two include checkpointing."""

CAPTION_TOKENS = 100
"""Length of captions in the table of disk space, for models with entries as long as the caption."""

ITEM_BYTES = 2
"""Bytes per value in entries of float16 or bfloat16."""


@dataclass(frozen=True)
class Memory:
    """Peak memory on one GPU.

    Attributes:
        resolution: Edge of the images.
        training: Bytes of a training, by setting.
        latents: Bytes while latents are encoded, before batches shrink.
        text: Bytes while captions are encoded.
        proposals: Cheapest change for a card, by its GB; only for large models.
    """

    resolution: int
    training: dict[str, int]
    latents: int
    text: int
    proposals: dict[int, str]


def memory_of(published: Published, folder: Path) -> Memory:
    """Return the forecast for a model; `folder` receives its configuration files."""
    from pipeline.memory.worker.encoding import latents_bytes, text_memory

    family = load_family(published.write(folder / "model"))
    resolution = RESOLUTIONS.get(published.name, 1024)
    size = Size(resolution, resolution)
    recipe = training_recipe(family.model.path)
    forecast = TrainingForecast(family, recipe, size)
    checkpointing = forecast.variant
    variants = {
        "bf16": replace(checkpointing, checkpointing=False),
        "checkpointing": checkpointing,
        "int8": replace(checkpointing, quantize="int8"),
        "nf4": replace(checkpointing, quantize="nf4"),
    }
    return Memory(
        resolution=resolution,
        training={name: forecast.memory(variants[name]).device for name in SETTINGS},
        latents=latents_bytes(family, size, family.vae_compute_dtype("auto"))[1],
        text=text_memory(family, family.text_compute_dtypes("auto")).device,
        proposals={
            gigabytes: _proposal(forecast, recipe, gigabytes)
            for gigabytes in (SMALL_CARDS_GB if published.name in LARGE_MODELS else ())
        },
    )


def _proposal(forecast: TrainingForecast, recipe: Recipe, gigabytes: int) -> str:
    """Return what `latentline plan` proposes for a card, in addition to gradient checkpointing."""
    from pipeline.memory.worker.changes import cheapest_change
    from pipeline.trained_lora.worker.memory.resident_blocks import RESERVED_BYTES

    usable_bytes = gigabytes * GIB - RESERVED_BYTES
    if forecast.memory(forecast.variant).device <= usable_bytes:
        return "no change"
    change = cheapest_change(forecast, recipe, usable_bytes)
    if not change.fits:
        return "-"
    return ", ".join(setting.removeprefix("training.") for setting in change.settings)


def proposal_line(name: str, memory: Memory) -> str:
    """Return a model's line in the table of proposals."""
    return _line([name, *(memory.proposals[gigabytes] for gigabytes in SMALL_CARDS_GB)])


def fit_line(name: str, memory: Memory) -> str:
    """Return a model's line in the table of cards: the first setting that fits each card."""
    return _line([name, f"{memory.resolution}", *(_setting_for(gigabytes, memory) for gigabytes in CARDS_GB)])


def _setting_for(gigabytes: int, memory: Memory) -> str:
    from pipeline.trained_lora.worker.memory.resident_blocks import RESERVED_BYTES

    usable_bytes = gigabytes * GIB - RESERVED_BYTES
    setting = next((name for name in SETTINGS if memory.training[name] <= usable_bytes), None)
    if setting is None:
        return "-"
    return setting if memory.text <= usable_bytes else f"{setting} *"


def memory_line(name: str, memory: Memory) -> str:
    """Return a model's line in the table of memory."""
    sizes = [*(memory.training[setting] for setting in SETTINGS), memory.latents, memory.text]
    return _line([name, *(f"{size / GIB:.1f}" for size in sizes)])


def disk_line(published: Published, folder: Path) -> str:
    """Return a model's line in the table of disk space; `folder` receives its configuration files."""
    family = load_family(published.write(folder / "model"))
    resolution = RESOLUTIONS.get(published.name, 1024)
    latent_bytes = ITEM_BYTES * math.prod(family.latent_shape(Size(resolution, resolution)))
    caption_bytes, note = _caption_bytes(family)
    sizes = [f"{1000 * size / 1e9:.2f} GB" for size in (latent_bytes, caption_bytes)]
    return _line([published.name, *sizes, note])


def _caption_bytes(family: WorkerFamily) -> tuple[int, str]:
    """Return the size of a caption's tensors, and a note on their length."""
    shapes = dict(family.text_shapes())
    longest, *rest = shapes["text_embedding"]
    if family.spec.text.padding == "stored":
        total = sum(map(math.prod, shapes.values()))
        return ITEM_BYTES * total, f"{ITEM_BYTES * total / 1e6:.1f} MB each"
    shapes["text_embedding"] = (min(longest, CAPTION_TOKENS), *rest)
    per_token = ITEM_BYTES * math.prod(rest)
    return ITEM_BYTES * sum(map(math.prod, shapes.values())), f"{per_token / 1e3:.1f} kB per token"


def with_table(page: str, name: str, lines: Iterable[str]) -> str:
    """Return the page with the rows of one table replaced."""
    start, end = (MARKERS.format(name=name, edge=edge) for edge in ("begin", "end"))
    before, _, rest = page.partition(start)
    head, _, after = rest.partition(end)
    heading = head.strip().splitlines()[:2]
    return before + "\n".join([start, "", *heading, *lines, "", end]) + after


def complete_page(page: str, models: Sequence[Published] = PUBLISHED) -> str:
    """Return the page with all tables computed again."""
    fits: list[str] = []
    sizes: list[str] = []
    disk: list[str] = []
    proposals: list[str] = []
    steps: list[str] = []
    for published in models:
        with TemporaryDirectory() as folder:
            disk.append(disk_line(published, Path(folder)))
        with TemporaryDirectory() as folder:
            memory = memory_of(published, Path(folder))
        fits.append(fit_line(published.name, memory))
        steps.append(step_line(published, memory.resolution, memory.training["checkpointing"]))
        sizes.append(memory_line(published.name, memory))
        if memory.proposals:
            proposals.append(proposal_line(published.name, memory))
    flux = next(each for each in PUBLISHED if each.name == "FLUX.1 dev")
    tables = {"cards": fits, "memory": sizes, "proposals": proposals, "disk": disk, "steps": steps}
    tables["timings"] = timing_lines(PUBLISHED)
    for name, lines in {**tables, "streaming": streaming_lines(flux)}.items():
        page = with_table(page, name, lines)
    return page


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the tables into the page."""
    PAGE.write_text(complete_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    # The text encoder of Kolors compiles functions that do not accept the meta device.
    os.environ["PYTORCH_JIT"] = "0"
    main()
