"""Comparison of many tensors that names those that differ, for assertions that explain themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor] | Iterable[Tensor]
"""Tensors by name, or in an order that takes the place of names."""


def differing_tensors(actual: Tensors, expected: Tensors) -> list[str]:
    """Return one line per tensor that is not equal bit for bit, or that only one side has, in order."""
    ours, theirs = _by_name(actual), _by_name(expected)
    lines = {name: _difference(ours.get(name), theirs.get(name)) for name in {**theirs, **ours}}
    return [f"{name}: {line}" for name, line in lines.items() if line]


def _by_name(tensors: Tensors) -> dict[str, Tensor]:
    if isinstance(tensors, Mapping):
        return dict(tensors)
    return {f"tensor {number}": tensor for number, tensor in enumerate(tensors)}


def _difference(actual: Tensor | None, expected: Tensor | None) -> str:
    """Return how a tensor differs from the expected one; "" if it does not."""
    if actual is None or expected is None:
        return "missing" if actual is None else "not expected"
    kinds = [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (actual, expected)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]}, expected {kinds[1]}"
    if torch.equal(actual, expected):
        return ""
    difference = (actual.double() - expected.double()).abs()
    return f"{int((difference != 0).sum())} of {actual.numel()} values differ by up to {difference.max():.3g}"
