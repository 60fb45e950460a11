"""An adapter that begins as a part of the base weights, instead of at random and zero.

PiSSA (https://arxiv.org/abs/2404.02948) takes the part with the largest singular values, OLoRA
(https://arxiv.org/abs/2406.01775) the first columns and rows of a QR decomposition. Both papers then take
that part off the base weights. Here the base weights stay as they are, and a second adapter that never
changes takes it off: the sum is the same, no base weight is rounded, and what was learned is the two adapters
together. A LoRA of twice the rank, to be put on the very base model, holds both.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pipeline.errors import TrainingError
from pipeline.trained_lora.plan.seeding import hash_bits
from pipeline.trained_lora.worker.adapter.lora import ADAPTER, FROZEN_ADAPTER, lora_modules

if TYPE_CHECKING:
    from pipeline.recipe import LoraSettings

_SPARE = 16
"""Directions beyond the rank that are followed, so that those within are found well."""

_ROUNDS = 8

_SMALL = 256
"""Sides up to which a whole decomposition takes no time."""


def init_from_base_weights(denoiser: nn.Module, settings: LoraSettings, *, seed: int) -> None:
    """Give a fresh adapter the weights of `init`, and put beside it what takes them off again.

    Both depend on the base weights and `seed` alone; global random state is left as it was.

    Args:
        denoiser: With the adapter of `settings`, of kind lora.
        settings: Whose `init` is pissa or olora.
        seed: Of the directions in which the search for large singular values begins.

    Raises:
        TrainingError: A module has fewer rows or columns than the rank.
    """
    model = cast("Any", denoiser)
    fixed = deepcopy(model.peft_config[ADAPTER])
    fixed.lora_dropout = 0.0
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Already found a `peft_config` attribute", UserWarning
        )  # two are meant
        model.add_adapter(fixed, adapter_name=FROZEN_ADAPTER)
    for name, module in lora_modules(denoiser):
        layer = cast("Any", module)
        weight = layer.get_base_layer().weight.detach().float().flatten(1)
        rank = layer.r[ADAPTER]
        if rank > min(weight.shape):
            what = f"init: {settings.init} of rank {rank} is more than {name} has, {min(weight.shape)}"
            fix = "give it a smaller rank under training.lora.ranks, or set init: kaiming"
            raise TrainingError(what, where="training.lora.init", fix=fix)
        if settings.init == "pissa":
            up, down = _principal(weight, rank, scale=layer.scaling[ADAPTER], seed=seed)
        else:
            up, down = _orthogonal(weight, rank)
        for adapter, sign in ((ADAPTER, 1.0), (FROZEN_ADAPTER, -1.0)):
            for factor, values in ((layer.lora_A[adapter], down), (layer.lora_B[adapter], sign * up)):
                shape = factor.weight.shape
                factor.weight = nn.Parameter(values.reshape(shape).clone(), requires_grad=adapter == ADAPTER)
        layer.set_adapter([ADAPTER, FROZEN_ADAPTER])
        for factor in (layer.lora_A[FROZEN_ADAPTER], layer.lora_B[FROZEN_ADAPTER]):
            factor.weight.requires_grad_(False)


@contextmanager
def at_initial_weights(denoiser: nn.Module) -> Generator[None]:
    """Inside, the adapter is the part of the base weights that it began as, which the fixed one takes off.

    Afterwards it is what it was, bit for bit.
    """
    kept: list[tuple[nn.Parameter, Tensor]] = []
    for _, module in lora_modules(denoiser):
        layer = cast("Any", module)
        for factors, sign in ((layer.lora_A, 1.0), (layer.lora_B, -1.0)):
            weight: nn.Parameter = factors[ADAPTER].weight
            kept.append((weight, weight.data))
            weight.data = sign * factors[FROZEN_ADAPTER].weight.data
    try:
        yield
    finally:
        for weight, trained in kept:
            weight.data = trained


def _principal(weight: Tensor, rank: int, *, scale: float, seed: int) -> tuple[Tensor, Tensor]:
    """(up, down): scale * up @ down is the part of the `rank` largest singular values, shared evenly."""
    left, values, right = largest_singular(weight, rank, seed=seed)
    root = (values / scale).sqrt()
    return left * root, root[:, None] * right


def _orthogonal(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(up, down): the first `rank` columns of Q and rows of R."""
    columns, rows = torch.linalg.qr(weight)
    return columns[:, :rank], rows[:rank]


def largest_singular(weight: Tensor, rank: int, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `rank` largest singular values, descending, with their left (rows, rank) and right (rank, columns).

    Of a matrix much larger than the rank by subspace iteration (algorithm 4.4 of
    https://arxiv.org/abs/0909.4061), of any other exactly.

    Args:
        weight: Float32 (rows, columns).
        rank: At most the shorter side.
        seed: Of the first directions.
    """
    followed = rank + _SPARE
    if min(weight.shape) <= max(2 * followed, _SMALL):
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        return left[:, :rank], values[:rank], right[:rank]
    random = torch.Generator().manual_seed(hash_bits(63, seed, "directions"))
    basis = weight @ torch.randn(weight.shape[1], followed, generator=random).to(weight.device)
    for _ in range(_ROUNDS):
        basis = weight.T @ torch.linalg.qr(basis).Q
        basis = weight @ torch.linalg.qr(basis).Q
    basis = torch.linalg.qr(basis).Q
    left, values, right = torch.linalg.svd(basis.T @ weight, full_matrices=False)
    return basis @ left[:, :rank], values[:rank], right[:rank]
