"""Sums of LoRAs and LoRAs of smaller ranks, layer by layer.

The sum of several LoRAs is a LoRA with their stacked factors, and so is exact. The closest LoRA of a smaller
rank keeps the largest singular values of a layer's delta weight (Eckart and Young 1936). They follow from the
factors: with the QR decompositions up = Q1 R1 and down^T = Q2 R2, up @ down has the singular values of
R1 R2^T, which is only (rank, rank).

The *energy* of some singular values is the sum of their squares relative to that of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.lora_files.layers import Layer

Double: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SingularValues:
    """Decomposition of a layer's delta weight: left @ diag(values) @ right, the largest value first."""

    left: Double
    values: Double
    right: Double

    @property
    def norm(self) -> float:
        """Frobenius norm of the delta weight."""
        return float(np.linalg.norm(self.values))

    def energy(self, rank: int) -> float:
        """Return the energy of the first `rank` values, from 0 to 1; 1 if all are zero."""
        squares = self.values**2
        return float(squares[:rank].sum() / squares.sum()) if squares.any() else 1.0

    def rank_for(self, energy: float) -> int:
        """Return the smallest rank, from 1, that keeps at least this energy."""
        return next(rank for rank in range(1, len(self.values) + 1) if self.energy(rank) >= energy)


def decompose(layer: Layer) -> SingularValues:
    """Return the singular value decomposition of a layer's delta weight."""
    down, up = layer.matrices
    left, left_factor = np.linalg.qr(up)
    right, right_factor = np.linalg.qr(down.T)
    inner_left, values, inner_right = np.linalg.svd(left_factor @ right_factor.T, full_matrices=False)
    return SingularValues(left @ inner_left, values, inner_right @ right.T)


def reduced(layer: Layer, *, max_rank: int | None, energy: float | None) -> tuple[Layer, float]:
    """Return the closest layer of a smaller rank, and the energy that it keeps.

    Args:
        layer: A layer, which is returned as it is if its rank is small enough.
        max_rank: Largest rank.
        energy: Least energy to keep; the rank is then the smallest one with it, but at most `max_rank`.
    """
    if energy is None and (max_rank is None or layer.rank <= max_rank):
        return layer, 1.0
    singular = decompose(layer)
    rank = len(singular.values) if energy is None else singular.rank_for(energy)
    rank = rank if max_rank is None else min(rank, max_rank)
    root = np.sqrt(singular.values[:rank])
    down = root[:, None] * singular.right[:rank]
    up = singular.left[:, :rank] * root
    smaller = Layer(
        down.astype(np.float32).reshape(rank, *layer.down.shape[1:]),
        up.astype(np.float32).reshape(len(up), rank, *layer.up.shape[2:]),
    )
    return smaller, singular.energy(rank)


def summed(terms: Sequence[tuple[float, Layer]]) -> Layer:
    """Return the sum of layers of one weight, each times a number; its rank is the sum of their ranks."""
    weight, layer = terms[0]
    if len(terms) == 1:
        return Layer(layer.down, layer.up, layer.scale * weight)

    # The number is one factor's alone, so that whatever is stored in a half dtype is rounded once.
    ups = [each.up * np.float32(number * each.scale) for number, each in terms]
    return Layer(np.concatenate([each.down for _, each in terms]), np.concatenate(ups, axis=1))


def relative_error(terms: Sequence[tuple[float, Layer]], result: Layer) -> float:
    """Return the Frobenius norm of (sum of terms - result), relative to that of the sum.

    Neither delta weight is computed: with all factors stacked to up @ down, the square of the norm is the sum
    of (up^T up) * (down down^T), which has the size of the ranks.
    """
    matrices = [(number, *each.matrices) for number, each in terms]
    ups = np.concatenate([number * up for number, _, up in matrices], axis=1)
    downs = np.concatenate([down for _, down, _ in matrices])
    down, up = result.matrices
    difference = _squared_norm(np.concatenate([ups, -up], axis=1), np.concatenate([downs, down]))
    size = _squared_norm(ups, downs)
    return math.sqrt(difference / size) if size else math.sqrt(difference)


def _squared_norm(up: Double, down: Double) -> float:
    # Rounding may leave a tiny negative number.
    return max(float(((up.T @ up) * (down @ down.T)).sum()), 0.0)
