"""The LoRA that does what an adapter of another kind does: files hold it, for every program."""

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
    """The weights of the LoRA that does what the adapter does, by peft's names: float32 on the CPU.

    A LoRA is that itself, or with the fixed one beside it of twice the rank. Of the other kinds every number
    is the product of two of the adapter's.
    """
    state = adapter_state(denoiser)
    for name, module in lora_modules(denoiser):
        if isinstance(module, LoHaLayer):
            up, down = _of_loha(*(state.pop(f"{name}.hada_w{side}") for side in ("1_a", "1_b", "2_a", "2_b")))
        elif isinstance(module, LoKrLayer):
            sides = ("w1", "w2", "w2_a", "w2_b")
            up, down = _of_lokr(*(state.pop(f"{name}.lokr_{side}", None) for side in sides))
        elif FROZEN_ADAPTER in module.r:
            up, down = _of_both(*(_both(state, f"{name}.lora_{side}.weight") for side in ("B", "A")))
        else:
            continue
        kernel = cast("Tensor", cast("Any", module).get_base_layer().weight).shape[2:]
        state[f"{name}.lora_A.weight"] = down.reshape(len(down), -1, *kernel).contiguous()
        state[f"{name}.lora_B.weight"] = up.reshape(*up.shape, *(1 for _ in kernel)).contiguous()
    return state


def _both(state: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """One factor of the trained adapter and of the fixed one, as matrices; taken out of `state`."""
    return state.pop(name).flatten(1), state.pop(f"{FROZEN_ADAPTER}:{name}").flatten(1)


def _of_both(ups: tuple[Tensor, Tensor], downs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(up, down) of the sum of two LoRAs of one scale."""
    return torch.cat(ups, dim=1), torch.cat(downs)


def _of_loha(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """(up, down) of what is added, (a @ b) * (c @ d), value by value.

    `a` and `c` are (out, rank), `b` and `d` (rank, in). It is the product of two matrices of rank x rank
    columns and rows: column i, j is column i of `a` times column j of `c`, and row i, j is row i of `b` times
    row j of `d`.
    """
    return (a[:, :, None] * c[:, None, :]).flatten(1), (b[:, None] * d[None]).flatten(0, 1)


def _of_lokr(
    left: Tensor | None, whole: Tensor | None, up: Tensor | None, down: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(up, down) of what is added, the Kronecker product of `left` and either `whole` or `up @ down`.

    The Kronecker product of two products is the product of the Kronecker products of their first and of
    their second matrices. A matrix that is whole is the product of itself and ones on the diagonal, on its
    shorter side.
    """
    assert left is not None
    if whole is not None:
        up, down = _halves(whole.flatten(1))
    assert up is not None
    assert down is not None
    first, second = _halves(left)
    return torch.kron(first, up), torch.kron(second, down)


def _halves(whole: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = whole.shape
    return (torch.eye(rows), whole) if rows <= columns else (whole, torch.eye(columns))


def lora_shapes(module: Adapted) -> tuple[Shape, Shape]:
    """Shapes of one module's two weights in `lora_state`: (rank, in, *kernel) and (out, rank, *ones).

    Only shapes are read, so that it answers for weights on the meta device too.
    """
    adapted = cast("Any", module)
    if isinstance(module, LoHaLayer | LoKrLayer):
        kernel = tuple(adapted.get_base_layer().weight.shape[2:])
        rows, columns, rank = _loha_size(adapted) if isinstance(module, LoHaLayer) else _lokr_size(adapted)
        return (rank, columns // math.prod(kernel), *kernel), (rows, rank, *(1 for _ in kernel))
    down, up = (side[ADAPTER].weight.shape for side in (adapted.lora_A, adapted.lora_B))
    both = 2 if FROZEN_ADAPTER in module.r else 1
    return (both * down[0], *down[1:]), (up[0], both * up[1], *up[2:])


def _loha_size(adapted: Any) -> tuple[int, int, int]:
    """(rows, columns, rank): columns are those of the weight flattened to a matrix."""
    rows, rank = adapted.hada_w1_a[ADAPTER].shape
    return rows, adapted.hada_w1_b[ADAPTER].shape[1], rank * rank


def _lokr_size(adapted: Any) -> tuple[int, int, int]:
    above, before = adapted.lokr_w1[ADAPTER].shape
    if ADAPTER in adapted.lokr_w2:
        rows, *others = adapted.lokr_w2[ADAPTER].shape
        columns = math.prod(others)
        rank = min(rows, columns)
    else:
        rows, rank = adapted.lokr_w2_a[ADAPTER].shape
        columns = adapted.lokr_w2_b[ADAPTER].shape[1]
    return above * rows, before * columns, min(above, before) * rank
