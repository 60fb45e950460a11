"""The limit of the delta weights' norms, `training.lora.scale_weight_norms`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from pipeline.trained_lora.worker.adapter.lora import ADAPTER, lora_modules
from pipeline.trained_lora.worker.adapter.rotation_limit import RotationLimit

if TYPE_CHECKING:
    from pipeline.recipe import LoraSettings


def norm_limit(networks: Iterable[nn.Module], lora: LoraSettings) -> WeightNormLimit | RotationLimit | None:
    """Return the limit that applies to the adapters after each step; None if there is none."""
    if lora.kind == "oft":
        return RotationLimit(networks)
    return None if lora.scale_weight_norms is None else WeightNormLimit(networks, lora.scale_weight_norms)


class WeightNormLimit:
    """Scales down LoRAs with too large a delta weight, as `--scale_weight_norms` of sd-scripts.

    With the Frobenius norm n of a module's delta weight, scale * up @ down, and the limit m, both matrices
    are multiplied by sqrt(m / n) if n > m (`apply_max_norm_regularization` in networks/lora.py of
    https://github.com/kohya-ss/sd-scripts).
    """

    def __init__(self, networks: Iterable[nn.Module], limit: float) -> None:
        """Limit the norms of all modules with a LoRA in these networks to `limit`."""
        self._limit = limit
        layers = [module for network in networks for _, module in lora_modules(network)]
        assert all(isinstance(layer, LoraLayer) for layer in layers)
        self._layers = cast("list[Any]", layers)

    @torch.no_grad()
    def apply(self, counts: Tensor | None = None) -> None:
        """Scale the matrices in place; a module within the limit keeps them bit for bit.

        With `counts`, a boolean scalar on their device, nothing changes unless it holds. The host does not
        wait for a GPU.
        """
        for layer in self._layers:
            down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            norm = layer.scaling[ADAPTER] * product_norm(up.flatten(1), down.flatten(1))
            is_too_large = norm > self._limit if counts is None else (norm > self._limit) & counts
            factor = torch.where(is_too_large, (self._limit / norm).sqrt(), 1.0)
            down.mul_(factor)
            up.mul_(factor)


def product_norm(up: Tensor, down: Tensor) -> Tensor:
    """Return the Frobenius norm of up @ down, a scalar; `up` is (out, rank) and `down` (rank, in).

    It is computed from two matrices (rank, rank), because the product itself has the size of a weight.
    """
    # |U D|^2 = trace(D^T U^T U D) = sum over i, j of (U^T U)_ij (D D^T)_ij
    squared = ((up.mT @ up) * (down @ down.mT)).sum()
    return squared.clamp(min=0.0).sqrt()
