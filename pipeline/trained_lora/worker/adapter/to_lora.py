"""Conversion of a LoHa, LoKr, PiSSA or OLoRA adapter to the LoRA with the same delta weights.

The exported files contain this LoRA, because every program can load it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from peft.tuners.loha import LoHaLayer
from peft.tuners.lokr import LoKrLayer
from torch import Tensor

from pipeline.trained_lora.worker.adapter.lora import (
    ADAPTER,
    FROZEN_ADAPTER,
    Adapted,
    adapter_state,
    lora_modules,
)

if TYPE_CHECKING:
    from torch import nn

Shape: TypeAlias = tuple[int, ...]


def lora_state(denoiser: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the LoRA that equals the adapter, under peft's names: float32 on the CPU.

    A LoRA is returned as it is. With a frozen adapter, the result has twice the rank. For the other kinds
    each number is a product of two of the adapter's numbers.
    """
    state = adapter_state(denoiser)
    for name, module in lora_modules(denoiser):
        if isinstance(module, LoHaLayer):
            factors = [state.pop(f"{name}.hada_w{side}") for side in ("1_a", "1_b", "2_a", "2_b")]
            up, down = _from_loha(*factors)
        elif isinstance(module, LoKrLayer):
            parts = {side: state.pop(f"{name}.lokr_{side}", None) for side in ("w1", "w2", "w2_a", "w2_b")}
            up, down = _from_lokr(**parts)
        elif FROZEN_ADAPTER in module.r:
            ups, downs = (_pop_both(state, f"{name}.lora_{side}.weight") for side in ("B", "A"))
            # [up, frozen_up] @ [down; frozen_down] is the sum of the two products.
            up, down = torch.cat(ups, dim=1), torch.cat(downs)
        else:
            continue
        kernel = cast("Tensor", cast("Any", module).get_base_layer().weight).shape[2:]
        state[f"{name}.lora_A.weight"] = down.reshape(len(down), -1, *kernel).contiguous()
        state[f"{name}.lora_B.weight"] = up.reshape(*up.shape, *(1 for _ in kernel)).contiguous()
    return state


def _pop_both(state: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Remove one factor of the trained and of the frozen adapter from `state`; return both as matrices."""
    return state.pop(name).flatten(1), state.pop(f"{FROZEN_ADAPTER}:{name}").flatten(1)


def _from_loha(w1_a: Tensor, w1_b: Tensor, w2_a: Tensor, w2_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (up, down) of the element-wise product (w1_a @ w1_b) * (w2_a @ w2_b).

    The w*_a are (out, rank) and the w*_b (rank, in). The result has rank * rank columns and rows: column (i,
    j) of `up` is column i of w1_a times column j of w2_a, and row (i, j) of `down` is row i of w1_b times row
    j of w2_b.
    """
    return (w1_a[:, :, None] * w2_a[:, None, :]).flatten(1), (w1_b[:, None] * w2_b[None]).flatten(0, 1)


def _from_lokr(
    w1: Tensor | None, w2: Tensor | None, w2_a: Tensor | None, w2_b: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (up, down) of the Kronecker product of `w1` and either `w2` or `w2_a @ w2_b`.

    (A B) x (C D) = (A x C)(B x D), where x is the Kronecker product. A matrix without factors is split into
    itself and an identity on its shorter side.
    """
    assert w1 is not None
    if w2 is not None:
        w2_a, w2_b = _split_off_identity(w2.flatten(1))
    assert w2_a is not None
    assert w2_b is not None
    w1_a, w1_b = _split_off_identity(w1)
    return torch.kron(w1_a, w2_a), torch.kron(w1_b, w2_b)


def _split_off_identity(matrix: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = matrix.shape
    return (torch.eye(rows), matrix) if rows <= columns else (matrix, torch.eye(columns))


def lora_shapes(module: Adapted) -> tuple[Shape, Shape]:
    """Return the shapes of a module in `lora_state`: (rank, in, *kernel) and (out, rank, *ones).

    Only shapes are read, so the weights may be on the meta device.
    """
    layer = cast("Any", module)
    if isinstance(module, LoHaLayer | LoKrLayer):
        kernel = tuple(layer.get_base_layer().weight.shape[2:])
        rows, columns, rank = _loha_size(layer) if isinstance(module, LoHaLayer) else _lokr_size(layer)
        return (rank, columns // math.prod(kernel), *kernel), (rows, rank, *(1 for _ in kernel))
    down, up = (side[ADAPTER].weight.shape for side in (layer.lora_A, layer.lora_B))
    num_adapters = 2 if FROZEN_ADAPTER in module.r else 1
    return (num_adapters * down[0], *down[1:]), (up[0], num_adapters * up[1], *up[2:])


def _loha_size(layer: Any) -> tuple[int, int, int]:
    """Return (rows, columns, rank) of the delta weight, flattened to a matrix."""
    rows, rank = layer.hada_w1_a[ADAPTER].shape
    return rows, layer.hada_w1_b[ADAPTER].shape[1], rank * rank


def _lokr_size(layer: Any) -> tuple[int, int, int]:
    """Return (rows, columns, rank) of the delta weight, flattened to a matrix."""
    w1_rows, w1_columns = layer.lokr_w1[ADAPTER].shape
    if ADAPTER in layer.lokr_w2:
        w2_rows, *w2_others = layer.lokr_w2[ADAPTER].shape
        w2_columns = math.prod(w2_others)
        w2_rank = min(w2_rows, w2_columns)
    else:
        w2_rows, w2_rank = layer.lokr_w2_a[ADAPTER].shape
        w2_columns = layer.lokr_w2_b[ADAPTER].shape[1]
    return w1_rows * w2_rows, w1_columns * w2_columns, min(w1_rows, w1_columns) * w2_rank
