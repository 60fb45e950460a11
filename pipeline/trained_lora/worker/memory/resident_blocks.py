"""The number of blocks that stay on the GPU under `training.offload: auto`, from the memory forecast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from accelerate.utils import gather_object

from pipeline.errors import TrainingError
from pipeline.images.geometry import placements_of
from pipeline.models.worker.offload.streamed_blocks import NUM_SLOTS
from pipeline.trained_lora.worker.memory.training import TrainingForecast, Variant

if TYPE_CHECKING:
    from pipeline.images.geometry import Size
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import Recipe

RESERVED_BYTES = 2**30
"""Memory of a GPU that tensors cannot use: CUDA's context, workspaces and unused parts of allocated blocks.

An assumption; it is not measured.
"""

GIB = 2**30


@dataclass(frozen=True)
class ResidentBlocks:
    """The resolved value of `training.offload`.

    Attributes:
        offload: Number of blocks that stay on the GPU, or "none" if all do.
        num_blocks: Number of repeated blocks; None if nothing had to be forecast.
        reason: Sentence for the log; empty unless the recipe's value is "auto".
    """

    offload: Literal["none"] | int
    num_blocks: int | None = None
    reason: str = ""

    def applied(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the resolved value."""
        training = recipe.training.model_copy(update={"offload": self.offload})
        return recipe.model_copy(update={"training": training})


def resident_blocks(family: WorkerFamily, recipe: Recipe, free_bytes: int | None) -> ResidentBlocks:
    """Resolve `training.offload`; processes of one run with the same arguments get the same result.

    `free_bytes` is the free memory of the GPU before the base model is loaded, and None on a CPU.

    Raises:
        TrainingError: The value is "auto", and the memory of the model cannot be forecast.
    """
    offload = recipe.training.offload
    if offload != "auto":
        return ResidentBlocks(offload)
    if free_bytes is None:
        return ResidentBlocks("none", reason="training.offload: auto streams no blocks on a CPU")

    usable_bytes = free_bytes - RESERVED_BYTES
    try:
        forecast = TrainingForecast(family, recipe, largest_size(recipe))
        chosen, device_bytes = most_resident(forecast, forecast.variant, usable_bytes)
    except (RuntimeError, NotImplementedError) as err:
        # An operator without a meta implementation, or one that needs the values of a tensor.
        raise TrainingError(
            f"memory cannot be forecast for {family.spec.name}: {str(err).partition(chr(10))[0]}",
            where="training.offload: auto",
            fix="auto needs this forecast; set training.offload to none, or to the number of blocks that "
            "stay on the GPU (0 needs the least memory)",
        ) from err

    num_blocks = forecast.num_blocks
    kept = num_blocks if chosen == "none" else chosen
    reason = (
        f"training.offload: auto keeps {kept} of {num_blocks} blocks on the GPU: the memory forecast for "
        f"training is {device_bytes / GIB:.1f} GiB, and {usable_bytes / GIB:.1f} GiB are usable"
    )
    if device_bytes > usable_bytes:
        reason += ", so memory may run out"
    return ResidentBlocks(chosen, num_blocks, reason)


def most_resident(
    forecast: TrainingForecast, variant: Variant, usable_bytes: int
) -> tuple[Literal["none"] | int, int]:
    """Return (`training.offload`, bytes) with the most blocks on the GPU that fit, for a variant.

    If nothing fits, return the value with the least memory.
    """
    # The slots hold as many blocks, so that streaming fewer blocks saves nothing.
    fewer = range(forecast.num_blocks - NUM_SLOTS - 1, -1, -1)
    sizes: dict[Literal["none"] | int, int] = {}
    for offload in ("none", *fewer):
        sizes[offload] = forecast.memory(replace(variant, offload=offload)).device
        if sizes[offload] <= usable_bytes:
            return offload, sizes[offload]
    return min(sizes.items(), key=lambda item: item[1])


def least_free_bytes(device: torch.device) -> int | None:
    """Return the free memory of the run's fullest GPU; None on a CPU. Every process of the run calls it."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    return least(free)


def least(own: int | None) -> int | None:
    """Return the smallest number of all processes of a run; None if a process has none."""
    numbers: list[int | None] = gather_object([own])
    known = [number for number in numbers if number is not None]
    return min(known) if len(known) == len(numbers) else None


def largest_size(recipe: Recipe) -> Size:
    """Return the bucket with the largest area."""
    sizes = [size for placement, _ in placements_of(recipe) for size in placement.sizes]
    return max(sizes, key=lambda size: size.height * size.width)
