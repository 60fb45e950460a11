"""The limit of OFT's blocks, within which they are rotations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipeline.trained_lora.worker.adapter.lora import ADAPTER, lora_modules

MAX_NORM = 0.5
"""Largest spectral norm of a block's skew-symmetric matrix: an angle of 53 degrees, and lengths change by at
most 6%."""


class RotationLimit:
    """Scales down the blocks that peft's series would no longer turn into rotations.

    peft computes a block as I + 2Q + 2Q^2 + 2Q^3 + Q^4 from a skew-symmetric matrix Q, the first terms of
    Cayley's transform, and so does the extension of ComfyUI. If Q has the eigenvalue i t, the block has one
    of the angle 2 atan(t) and the absolute value |1 - t^4|: nearly 1 for small t, but 0 at t = 1, and then
    without bound. At usual learning rates, training reaches such values within some hundred steps.
    """

    def __init__(self, networks: Iterable[nn.Module]) -> None:
        """Limit all blocks of the OFT in these networks."""
        layers = [module for network in networks for _, module in lora_modules(network)]
        self._rotations: list[Any] = [cast("Any", layer).oft_R[ADAPTER] for layer in layers]

    @torch.no_grad()
    def apply(self, counts: Tensor | None = None) -> None:
        """Scale the blocks in place; a block within the limit keeps every bit.

        With `counts`, a boolean scalar on their device, nothing changes unless it holds. The host does not
        wait for a GPU.
        """
        for rotation in self._rotations:
            norms = norm_bounds(rotation.weight, rotation.block_size)
            is_too_large = norms > MAX_NORM if counts is None else (norms > MAX_NORM) & counts
            rotation.weight.mul_(torch.where(is_too_large, MAX_NORM / norms, 1.0)[:, None])


def norm_bounds(numbers: Tensor, size: int) -> Tensor:
    """Return an upper bound of the spectral norm of each block's skew-symmetric matrix.

    Args:
        numbers: Upper triangles of the blocks, (blocks, size * (size - 1) / 2).
        size: Rows and columns of a block.
    """
    rows, columns = torch.triu_indices(size, size, 1, device=numbers.device)
    upper = numbers.new_zeros(len(numbers), size, size)
    upper[:, rows, columns] = numbers
    skew = upper - upper.mT

    # The singular values come in pairs, so |Q^4|^2, the sum of their 8th powers, is at least twice the power
    # of the largest one. Dividing by the largest number first keeps the powers in the range of float32.
    scale = numbers.abs().amax(dim=1).clamp(min=torch.finfo(numbers.dtype).tiny)
    squared = (skew / scale[:, None, None]) @ (skew / scale[:, None, None])
    return scale * (torch.linalg.matrix_norm(squared @ squared).square() / 2) ** 0.125
