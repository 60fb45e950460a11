"""Conversion of a LoHa, LoKr, PiSSA or OLoRA adapter to the LoRA with the same delta weights.

The exported files contain this LoRA, because every program can load it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from peft.tuners.loha import LoHaLayer
from peft.tuners.lokr import LoKrLayer
from peft.tuners.oft import OFTLayer
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

    A LoRA is returned as it is, and so are the rotations of OFT, which no LoRA of a usual size equals. With a
    frozen adapter, the result has twice the rank. For all other kinds each number is a product of two of the
    adapter's numbers.
    """
    state = adapter_state(denoiser)
    if any(isinstance(module, OFTLayer) for _, module in lora_modules(denoiser)):
        return state
    lora = {
        name: weight
        for name, weight in state.items()
        if ".lora_" in name and not name.startswith(f"{FROZEN_ADAPTER}:")
    }
    for name, module in lora_modules(denoiser):
        down, up = _lora_factors(module, lambda weight: weight.detach().float().cpu().clone())
        lora[f"{name}.lora_A.weight"], lora[f"{name}.lora_B.weight"] = down.contiguous(), up.contiguous()
    return lora


def lora_shapes(module: Adapted) -> tuple[Shape, Shape]:
    """Return the shapes of a module in `lora_state`: (rank, in, *kernel) and (out, rank, *ones)."""
    # On the meta device, where the factors of converted adapters are not computed.
    down, up = _lora_factors(module, lambda weight: weight.detach().to("meta"))
    return tuple(down.shape), tuple(up.shape)


def _lora_factors(module: Adapted, read: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return (down, up) of the LoRA that equals the module's adapter, from weights passed through `read`."""
    layer = cast("Any", module)
    if isinstance(module, LoHaLayer):
        factors = (layer.hada_w1_a, layer.hada_w1_b, layer.hada_w2_a, layer.hada_w2_b)
        up, down = _from_loha(*(read(factor[ADAPTER]) for factor in factors))
    elif isinstance(module, LoKrLayer):
        factors = (layer.lokr_w1, layer.lokr_w2, layer.lokr_w2_a, layer.lokr_w2_b)
        up, down = _from_lokr(*(read(each[ADAPTER]) if ADAPTER in each else None for each in factors))
    elif FROZEN_ADAPTER in module.r:
        # [up, frozen_up] @ [down; frozen_down] is the sum of the two products.
        up, down = (
            torch.cat([read(side[name].weight) for name in (ADAPTER, FROZEN_ADAPTER)], dim=dim)
            for side, dim in ((layer.lora_B, 1), (layer.lora_A, 0))
        )
        return down, up
    else:
        return read(layer.lora_A[ADAPTER].weight), read(layer.lora_B[ADAPTER].weight)

    kernel = layer.get_base_layer().weight.shape[2:]
    return down.reshape(len(down), -1, *kernel), up.reshape(*up.shape, *(1 for _ in kernel))


def _from_loha(w1_a: Tensor, w1_b: Tensor, w2_a: Tensor, w2_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (up, down) of the element-wise product (w1_a @ w1_b) * (w2_a @ w2_b).

    The w*_a are (out, rank) and the w*_b (rank, in).
    """
    # The result has rank * rank columns and rows: column (i, j) of `up` is column i of w1_a times column j of
    # w2_a, and row (i, j) of `down` is row i of w1_b times row j of w2_b.
    return (w1_a[:, :, None] * w2_a[:, None, :]).flatten(1), (w1_b[:, None] * w2_b[None]).flatten(0, 1)


def _from_lokr(
    w1: Tensor | None, w2: Tensor | None, w2_a: Tensor | None, w2_b: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (up, down) of the Kronecker product of `w1` and either `w2` or `w2_a @ w2_b`."""
    assert w1 is not None
    if w2 is not None:
        w2_a, w2_b = _split_off_identity(w2.flatten(1))
    assert w2_a is not None
    assert w2_b is not None

    # (A B) x (C D) = (A x C)(B x D), where x is the Kronecker product. A matrix without factors is split into
    # itself and an identity on its shorter side.
    w1_a, w1_b = _split_off_identity(w1)
    return torch.kron(w1_a, w2_a), torch.kron(w1_b, w2_b)


def _split_off_identity(matrix: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = matrix.shape
    identity = torch.eye(min(rows, columns), device=matrix.device)
    return (identity, matrix) if rows <= columns else (matrix, identity)
