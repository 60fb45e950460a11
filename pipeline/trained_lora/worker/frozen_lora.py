"""A frozen LoRA that is added to the outputs of a denoiser's layers, next to the adapter that is trained."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from peft.tuners.oft import OFTLayer
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

from pipeline.errors import TrainingError
from pipeline.models.worker.loading import pipeline_class
from pipeline.trained_lora.export.lora_files import is_magnitude
from pipeline.trained_lora.worker.export.read_back import loaded_weights

if TYPE_CHECKING:
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.trained_lora.worker.export.layouts import LoraWeights, ModuleWeights

Refusal = Callable[[Path, str], TrainingError]
"""Returns the error for a file, and the reason for which it cannot be used."""

_OTHER_TENSORS = ("hada_w1_a", "lokr_w1", "lokr_w1_a", "oft_blocks", "oft_R.weight")
"""Endings of tensors of adapters that are not a LoRA."""


class FrozenLora:
    """A frozen LoRA that is added to the outputs of a denoiser's layers while it is active.

    Attributes:
        active: Whether the adapter has an effect.
        num_modules: Number of layers with the adapter.
    """

    def __init__(
        self, denoiser: nn.Module, weights: LoraWeights, dtype: torch.dtype, *, scale: float = 1.0
    ) -> None:
        """Register a forward hook on each layer that the weights name; the adapter is not active yet.

        `denoiser` is on its device. The LoRA is computed in `dtype`, and multiplied by `scale`.
        """
        self.active = False
        self.num_modules = len(weights)
        device = next(denoiser.parameters()).device
        for name, weight in weights.items():
            factor = scale * weight.scale
            self._add_to(denoiser.get_submodule(name), weight, factor, dtype=dtype, device=device)

    def _add_to(
        self,
        layer: nn.Module,
        weight: ModuleWeights,
        scale: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # peft may have wrapped the layer, and only the layer inside has a convolution's shape and stride.
        base: Any = cast("Any", layer).get_base_layer() if hasattr(layer, "get_base_layer") else layer
        down, up = weight.down, scale * weight.up
        if isinstance(base, nn.Conv2d):
            down = down.reshape(-1, base.in_channels, *base.kernel_size)
            up = up[:, :, None, None]
        down, up = (factor.to(device, dtype) for factor in (down, up))

        def add(_layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            return output + product(inputs[0], base, down, up).to(output.dtype) if self.active else None

        # Added to the output instead of merged into the weight. So it is independent of the trained adapter's
        # kind, works with quantised weights, and can be switched off exactly. The layer inside an OFT gets
        # the rotated inputs, which a merged adapter would see too.
        (base if isinstance(layer, OFTLayer) else layer).register_forward_hook(add)

    @contextmanager
    def applied(self) -> Generator[None]:
        """Make the adapter active within the context."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before


def product(inputs: Tensor, layer: Any, down: Tensor, up: Tensor) -> Tensor:
    """Return up @ down @ inputs; a convolution's `down` has the stride, padding and dilation of its layer."""
    inputs = inputs.to(down.dtype)
    if isinstance(layer, nn.Conv2d):
        padding = cast("Any", layer.padding)
        return conv2d(conv2d(inputs, down, None, layer.stride, padding, layer.dilation), up)
    return linear(linear(inputs, down), up)


def frozen_weights(path: Path, family: WorkerFamily, denoiser: nn.Module, refused: Refusal) -> LoraWeights:
    """Return the weights of a LoRA file for the denoiser; other networks in the file are ignored.

    Raises:
        TrainingError: The file is not a LoRA of this denoiser; the error is `refused`'s.
    """
    if others := [key for key in lora_keys(path, refused) if is_magnitude(key) or _is_other(key)]:
        raise refused(path, f"it is not a plain LoRA, its first tensor of another kind is {others[0]}")
    try:
        # diffusers reads the file, so every layout works that the family's pipeline can load.
        weights = loaded_weights(
            path, pipeline_class(family), {"": denoiser}, {}, denoiser_name=family.spec.denoiser_name
        )
    except TrainingError as err:
        raise refused(path, err.what) from err
    if not weights:
        raise refused(path, f"it has no layer of {family.spec.name}'s {family.spec.denoiser_name}")
    return weights


def lora_keys(path: Path, refused: Refusal) -> list[str]:
    """Return the sorted keys of a LoRA file; the error of a file that cannot be read is `refused`'s."""
    try:
        with safe_open(path, framework="pt") as file:
            keys: list[str] = file.keys()
            return sorted(keys)
    except (OSError, SafetensorError) as err:
        raise refused(path, f"it cannot be read: {err}") from err


def num_values(path: Path, refused: Refusal) -> int:
    """Return the number of weights in a LoRA file; the error of a file that cannot be read is `refused`'s."""
    keys = lora_keys(path, refused)
    with safe_open(path, framework="pt") as file:
        return sum(prod(file.get_slice(key).get_shape()) for key in keys)


def _is_other(key: str) -> bool:
    return key.endswith(_OTHER_TENSORS)
