"""Computed times of training steps and encoding, with measured and published ones, for docs/hardware.md.

`pipeline.memory.gpus` has the formula, and `pipeline.memory.worker.operations` counts the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pipeline.images.geometry import Size
from pipeline.memory.gpus import GPUS, Work
from pipeline.memory.worker.operations import latent_work, step_work
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.memory.resident_blocks import RESERVED_BYTES
from pipeline.trained_lora.worker.memory.training import TrainingForecast
from tools.docs.streaming import training_recipe

if TYPE_CHECKING:
    from bench.gpu.configurations import Published


@dataclass(frozen=True)
class Timing:
    """The time of a step that somebody has measured, of a LoRA in bf16.

    Attributes:
        model: Name of the model.
        measured: Seconds by Latentline's own benchmark, by the name of the GPU.
        published: Seconds that SimpleTuner publishes, by the name of the GPU.
    """

    model: str
    resolution: int
    batch_size: int
    checkpointing: bool
    measured: dict[str, float]
    published: dict[str, float]

    @property
    def setting(self) -> str:
        """Settings that differ from batch size 1 without checkpointing."""
        checkpointing = ", checkpointing" if self.checkpointing else ""
        return f"{self.resolution} px, batch size {self.batch_size}{checkpointing}"


TIMINGS = (
    Timing("Stable Diffusion 1.5", 512, 1, False, {}, {"H100": 0.181, "L40S": 0.176}),
    Timing("Stable Diffusion 1.5", 512, 1, True, {}, {"H100": 0.305, "L40S": 0.292}),
    Timing("SDXL", 1024, 1, False, {"H100": 0.56}, {"H100": 0.606, "L40S": 0.585}),
    Timing("SDXL", 1024, 1, True, {}, {"H100": 1.080, "L40S": 1.029}),
    Timing("SDXL", 1024, 4, False, {"H100": 0.43}, {}),
    Timing("SDXL", 1024, 4, True, {"H100": 0.89}, {}),
    Timing("Kolors", 1024, 1, False, {}, {"H100": 0.635, "L40S": 0.628}),
    Timing("Z-Image", 512, 1, False, {}, {"H100": 0.243, "L40S": 0.316}),
    Timing("Z-Image", 512, 1, True, {}, {"H100": 0.479, "L40S": 0.493}),
    Timing("AuraFlow 0.3", 512, 1, False, {}, {"H100": 0.180, "L40S": 0.233}),
    Timing("FLUX.1 dev", 1024, 1, True, {"H100": 0.97}, {}),
    Timing("Krea 2", 512, 1, False, {}, {"H100": 0.272, "L40S": 0.661}),
    Timing("Krea 2", 512, 1, True, {}, {"H100": 0.371, "L40S": 0.919}),
    Timing("HiDream I1", 512, 1, False, {}, {"H100": 0.515}),
    Timing("Qwen-Image", 1024, 1, True, {}, {"H100": 1.202, "L40S": 3.377}),
)
"""Measured on an H100 (docs/hardware.md), and documentation/experimental/SEGMENTED_CHECKPOINTING.md of
bghira/SimpleTuner (bf16, without compiled blocks where both are stated).

It states 1024 px for Z-Image and AuraFlow, but the data set of Z-Image's example has 512 px, and the memory
is the forecast for 512 px: 12.87 against 12.84 GiB for Z-Image with checkpointing, 19.19 against 18.95 GiB
for AuraFlow.
"""


def published_work(
    published: Published, resolution: int, batch_size: int, *, checkpointing: bool, shares_casts: bool = True
) -> Work:
    """Return the work of a training step with a LoRA of rank 16 and the longest captions."""
    with TemporaryDirectory() as folder:
        family = load_family(published.write(Path(folder) / "model"))
        recipe, size = training_recipe(family.model.path), Size(resolution, resolution)
        forecast = TrainingForecast(family, recipe, size, shares_casts=shares_casts)
        variant = replace(forecast.variant, batch_size=batch_size, checkpointing=checkpointing)
        return step_work(forecast, variant)


def timing_lines(models: Sequence[Published], timings: Iterable[Timing] = TIMINGS) -> list[str]:
    """Return the rows that compare computed with measured and published times."""
    by_name = {each.name: each for each in models}
    lines: list[str] = []
    for timing in timings:
        work = published_work(
            by_name[timing.model],
            timing.resolution,
            timing.batch_size,
            checkpointing=timing.checkpointing,
            shares_casts=False,  # the trainings that were measured had a cast in each layer
        )
        for gpu in GPUS:
            known = [times.get(gpu.name) for times in (timing.measured, timing.published)]
            if any(known):
                times = [gpu.seconds(work), *known]
                cells = [
                    timing.model,
                    timing.setting,
                    gpu.name,
                    *("" if s is None else f"{s:.2f}" for s in times),
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def step_line(published: Published, resolution: int, training_bytes: int) -> str:
    """Return a model's row of computed times: a step on each card that `training_bytes` fits, and latents."""
    work = published_work(published, resolution, 1, checkpointing=True)
    cells = [published.name, f"{resolution}"]
    for gpu in GPUS:
        fits = training_bytes <= gpu.gigabytes * 2**30 - RESERVED_BYTES
        cells.append(f"{gpu.seconds(work):.2f}" if fits else "-")
    with TemporaryDirectory() as folder:
        family = load_family(published.write(Path(folder) / "model"))
        dtype = family.vae_compute_dtype("auto")
        encoding = latent_work(family, Size(resolution, resolution), dtype)
    for gpu in GPUS:
        # A VAE encodes several images at a time, so that starting kernels takes no time of its own.
        seconds = gpu.computing_s(encoding, float32=dtype == "float32")
        cells.append(f"{1000 * seconds / 60:.1f}")
    return f"| {' | '.join(cells)} |"
