"""Kernels and bytes of a training step, counted on tensors without data: `python -m bench.kernels`.

The step is a forward and a backward pass in bf16 with a LoRA of rank 16, without the optimizer. Each operator
that reads or writes memory counts as one kernel; views and allocations start none. Matrix products and
convolutions count as kernels only, because their time follows from their operations. Fused attention and RMS
norms are not counted, so bytes are a lower bound.

Counted are the operators of eager execution. Nothing here has been compared with a profiler on a GPU.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.gpu.configurations import PUBLISHED, Published
from pipeline.images.geometry import Size
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.recipe import LoraSettings, recipe_from_mapping
from pipeline.trained_lora.worker.adapter.lora import add_lora
from pipeline.trained_lora.worker.memory.cuda_rules import CudaRules
from pipeline.trained_lora.worker.memory.live_memory import LiveMemory
from pipeline.trained_lora.worker.memory.skeletons import skeleton
from pipeline.trained_lora.worker.memory.training import TrainingForecast

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin

SIZE = Size(1024, 1024)

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")


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


class Kernels(TorchDispatchMode):
    """Counts the kernels that operators would start, and the bytes that they read and write.

    Attributes:
        number: Number of kernels, with matrix products and convolutions.
        moved_bytes: Bytes of the inputs and outputs of all kernels but these.
        cast_bytes: Part of `moved_bytes` in copies between dtypes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.moved_bytes = 0
        self.cast_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if not outputs or func.is_view or name in _ALLOCATIONS or all(each.numel() == 0 for each in outputs):
            return result

        self.number += 1
        if name not in _PRODUCTS:
            num_bytes = sum(each.nbytes for each in inputs + outputs)
            self.moved_bytes += num_bytes
            if name == "_to_copy" and inputs[0].dtype != outputs[0].dtype:
                self.cast_bytes += num_bytes
        return result


def counted(family: WorkerFamily, step: Step) -> Kernels:
    """Return the kernels of a step with images of 1024 px."""
    denoiser = _adapted(family, checkpointing=step.checkpointing)
    values = {
        "datasets": [{"name": "images", "path": "images"}],
        "output_dir": "out",
        "model": {"base": str(family.model.path)},
    }
    forecast = TrainingForecast(family, recipe_from_mapping("kernels", values), SIZE)
    shape = (step.batch_size, *family.latent_shape(SIZE))
    noisy, target = (torch.empty(shape, device="meta") for _ in range(2))
    timesteps = torch.empty(step.batch_size, device="meta")
    conditions = forecast.conditions(step.batch_size)

    kernels = Kernels()

    @contextmanager
    def modes() -> Generator[None]:
        with CudaRules(torch.bfloat16):
            yield

    with kernels:
        with modes():
            prediction = family.denoiser.predict(denoiser, noisy, timesteps, conditions)
            loss = (prediction.float() - target).square().mean()
        LiveMemory().backward(loss, denoiser, modes)
    return kernels


def _adapted(family: WorkerFamily, *, checkpointing: bool) -> nn.Module:
    denoiser = skeleton(family, family.spec.denoiser_name, "bfloat16")
    with torch.device("meta"):
        lora = LoraSettings(rank=16, alpha=16.0)
        add_lora(cast("ModelMixin", denoiser), lora, targets=family.lora_targets(), seed=0)
    if checkpointing:
        family.denoiser.recompute_activations(denoiser)
    return denoiser.train()


def _published(name: str) -> Published:
    return next(each for each in PUBLISHED if each.name == name)


def table(steps: tuple[Step, ...] = STEPS) -> Iterator[str]:
    """Yield the lines of a Markdown table of steps."""
    yield "| step | kernels | GB read and written | of them casts |"
    yield "|---|---|---|---|"
    for step in steps:
        with TemporaryDirectory() as folder:
            kernels = counted(load_family(_published(step.model).write(Path(folder) / "model")), step)
        moved, casts = (round(each / 1e9) for each in (kernels.moved_bytes, kernels.cast_bytes))
        yield f"| {step.title} | {kernels.number:,} | {moved:,} | {casts:,} |"


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
