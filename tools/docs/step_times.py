"""Computed times of training steps and encoding, with measured and published ones, for docs/hardware.md.

A time is the longer one of

    GPU    operations / (share * peak) of products and of attention, and bytes / (share * bandwidth)
    CPU    kernels * time to start one

Work is counted on tensors without data, see `bench.operations`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from bench.operations import Operations, Work, step_work
from pipeline.images.geometry import Size
from pipeline.models.worker.family import load_family
from pipeline.trained_lora.worker.memory.cuda_rules import CudaRules
from pipeline.trained_lora.worker.memory.resident_blocks import RESERVED_BYTES
from pipeline.trained_lora.worker.memory.skeletons import skeleton
from pipeline.trained_lora.worker.memory.training import TrainingForecast
from tools.docs.streaming import training_recipe

if TYPE_CHECKING:
    from bench.gpu.configurations import Published
    from pipeline.models.worker.family import WorkerFamily

KERNEL_S = 41e-6
"""Time in which the CPU starts a kernel of eager PyTorch with peft and autocast.

The H100 in `bench/results` took 31 to 44 us. The published times of SDXL and Stable Diffusion 1.5 are 44 to
53 us per counted kernel, and those of Qwen-Image and Krea 2 34 to 39 us.
"""

BANDWIDTH_SHARE = 0.9
"""Share of the memory bandwidth that elementwise kernels reach. An assumption."""

FLOAT32_SHARE = 0.5
"""Peak of TF32 products relative to bf16, on all cards of the table."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, by NVIDIA's specifications, and the shares of its peak that PyTorch reaches.

    Attributes:
        name: Name.
        gigabytes: Memory in GB.
        peak_flops: Matrix products in bf16 with float32 sums, without sparsity, in operations per second.
        bandwidth: Memory bandwidth in bytes per second.
        product_share: Share of the peak in matrix products and convolutions.
        attention_share: Share of the peak in FlashAttention's forward and backward passes.
    """

    name: str
    gigabytes: int
    peak_flops: float
    bandwidth: float
    product_share: float = 0.5
    attention_share: float = 0.5

    def seconds(self, work: Work, *, float32: bool = False) -> float:
        """Return the computed time of work in bf16, or in TF32."""
        peak_flops = self.peak_flops * (FLOAT32_SHARE if float32 else 1)
        gpu_s = work.product_flops / (self.product_share * peak_flops)
        gpu_s += work.attention_flops / (self.attention_share * peak_flops)
        gpu_s += work.moved_bytes / (BANDWIDTH_SHARE * self.bandwidth)
        return max(gpu_s, work.kernels * KERNEL_S)


H100 = Gpu("H100", 80, 989.4e12, 3350e9, product_share=0.8, attention_share=0.26)
"""Shares as measured on an H100: 792 TFLOPS in products, and FlashAttention's 3.5 ms per layer of FLUX.1."""

GPUS = (
    Gpu("RTX 3090", 24, 71e12, 936e9),
    Gpu("RTX 4090", 24, 165.2e12, 1008e9),
    Gpu("L40S", 48, 362e12, 864e9),
    H100,
)


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


def published_work(published: Published, resolution: int, batch_size: int, *, checkpointing: bool) -> Work:
    """Return the work of a training step with a LoRA of rank 16 and the longest captions."""
    with TemporaryDirectory() as folder:
        family = load_family(published.write(Path(folder) / "model"))
        forecast = TrainingForecast(family, training_recipe(family.model.path), Size(resolution, resolution))
        variant = replace(forecast.variant, batch_size=batch_size, checkpointing=checkpointing)
        return step_work(forecast, variant)


def timing_lines(models: Sequence[Published], timings: Iterable[Timing] = TIMINGS) -> list[str]:
    """Return the rows that compare computed with measured and published times."""
    by_name = {each.name: each for each in models}
    lines: list[str] = []
    for timing in timings:
        work = published_work(
            by_name[timing.model], timing.resolution, timing.batch_size, checkpointing=timing.checkpointing
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


def latent_work(family: WorkerFamily, size: Size) -> tuple[Work, str]:
    """Return (work of encoding one image, dtype of the VAE)."""
    dtype = family.vae_compute_dtype("auto")
    vae, operations = skeleton(family, "vae", dtype), Operations()
    pixels = torch.empty(1, 3, size.height, size.width, device="meta")
    with operations, CudaRules(None), operations.attention:
        family.vae.posterior(vae, pixels)
    return operations.work(), dtype


def step_line(published: Published, resolution: int, training_bytes: int) -> str:
    """Return a model's row of computed times: a step on each card that `training_bytes` fits, and latents."""
    work = published_work(published, resolution, 1, checkpointing=True)
    cells = [published.name, f"{resolution}"]
    for gpu in GPUS:
        fits = training_bytes <= gpu.gigabytes * 2**30 - RESERVED_BYTES
        cells.append(f"{gpu.seconds(work):.2f}" if fits else "-")
    with TemporaryDirectory() as folder:
        family = load_family(published.write(Path(folder) / "model"))
        encoding, dtype = latent_work(family, Size(resolution, resolution))
    for gpu in GPUS:
        # A VAE encodes several images at a time, so that starting kernels takes no time of its own.
        seconds = gpu.seconds(replace(encoding, kernels=0), float32=dtype == "float32")
        cells.append(f"{1000 * seconds / 60:.1f}")
    return f"| {' | '.join(cells)} |"
