"""Kernels and bytes of a training step, counted on tensors without data: `python -m bench.kernels`.

The step is a forward and a backward pass in bf16 with a LoRA of rank 16, without the optimizer, as
`pipeline.memory.worker.operations` counts it: the operators of eager execution. Nothing here has
been compared with a profiler on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gpu.configurations import PUBLISHED, Published
from pipeline.images.geometry import Size
from pipeline.memory.gpus import Work
from pipeline.memory.worker.operations import step_work
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.recipe import recipe_from_mapping
from pipeline.trained_lora.worker.memory.training import TrainingForecast

SIZE = Size(1024, 1024)


@dataclass(frozen=True)
class Step:
    """A training step to count."""

    model: str
    batch_size: int
    checkpointing: bool

    @property
    def title(self) -> str:
        """Name of the step in the table."""
        return f"{self.model}, batch size {self.batch_size}" + (
            ", checkpointed" if self.checkpointing else ""
        )


STEPS = (Step("SDXL", 1, False), Step("SDXL", 4, False), Step("FLUX.1 dev", 1, True))


def counted(family: WorkerFamily, step: Step) -> Work:
    """Return the work of a step with images of 1024 px."""
    values = {
        "datasets": [{"name": "images", "path": "images"}],
        "output_dir": "out",
        "model": {"base": str(family.model.path)},
        "training": {"gradient_checkpointing": step.checkpointing, "batch_size": step.batch_size},
        "accelerate": {"mixed_precision": "bf16"},
    }
    forecast = TrainingForecast(family, recipe_from_mapping("kernels", values), SIZE)
    return step_work(forecast, forecast.variant)


def _published(name: str) -> Published:
    return next(each for each in PUBLISHED if each.name == name)


def table(steps: tuple[Step, ...] = STEPS) -> Iterator[str]:
    """Yield the lines of a Markdown table of steps."""
    yield "| step | kernels | GB read and written | of them casts |"
    yield "|---|---|---|---|"
    for step in steps:
        with TemporaryDirectory() as folder:
            work = counted(load_family(_published(step.model).write(Path(folder) / "model")), step)
        moved, casts = (round(each / 1e9) for each in (work.moved_bytes, work.cast_bytes))
        yield f"| {step.title} | {work.kernels:,} | {moved:,} | {casts:,} |"


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
