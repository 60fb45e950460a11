"""PiSSA and OLoRA: initialising the adapter with a part of the base weights.

PiSSA (https://arxiv.org/abs/2404.02948) takes the part of the largest singular values, OLoRA
(https://arxiv.org/abs/2406.01775) the first columns of Q and rows of R of a QR decomposition.

Both papers subtract that part from the base weights. Here a second, frozen adapter subtracts it, and a LoRA
of twice the rank holds both.
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
from pipeline.models.worker.offload.streamed_blocks import weights_loaded
from pipeline.trained_lora.plan.random_streams import hash_bits
from pipeline.trained_lora.worker.adapter.lora import ADAPTER, FROZEN_ADAPTER, lora_modules

if TYPE_CHECKING:
    from pipeline.recipe import LoraSettings

_OVERSAMPLING = 16
"""Number of directions followed beyond the rank, which improves those within it."""

_ITERATIONS = 8
"""Number of subspace iterations."""

_FULL_SVD_SIZE = 256
"""Shorter side of a matrix up to which a complete decomposition is fast."""


def init_from_base_weights(denoiser: nn.Module, settings: LoraSettings, *, seed: int) -> None:
    """Initialise a fresh adapter with a part of the base weights, which a new frozen adapter subtracts.

    Both depend only on the base weights and `seed`. The global random state does not change.
    """
    model = cast("Any", denoiser)

    # The papers and peft subtract the part from the base weights. Such a LoRA applies to a changed base model
    # only, and half-precision or quantised base weights would be rounded.
    frozen_config = deepcopy(model.peft_config[ADAPTER])
    frozen_config.lora_dropout = 0.0
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft warns about a second adapter, which is intended.
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute", UserWarning)
        model.add_adapter(frozen_config, adapter_name=FROZEN_ADAPTER)

    for name, module in lora_modules(denoiser):
        layer = cast("Any", module)
        with weights_loaded(denoiser, name):
            up, down = _initial_factors(name, layer, settings, seed=seed)
        for adapter, sign in ((ADAPTER, 1.0), (FROZEN_ADAPTER, -1.0)):
            for factor, values in ((layer.lora_A[adapter], down), (layer.lora_B[adapter], sign * up)):
                shape = factor.weight.shape
                factor.weight = nn.Parameter(values.reshape(shape).clone(), requires_grad=adapter == ADAPTER)
        layer.set_adapter([ADAPTER, FROZEN_ADAPTER])

        # `set_adapter` makes the weights of every active adapter trainable.
        for factor in (layer.lora_A[FROZEN_ADAPTER], layer.lora_B[FROZEN_ADAPTER]):
            factor.weight.requires_grad_(False)


def _initial_factors(name: str, layer: Any, settings: LoraSettings, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return (up, down) of a layer's initial adapter as matrices."""
    weight = layer.get_base_layer().weight.detach().float().flatten(1)
    rank = layer.r[ADAPTER]
    if rank > min(weight.shape):
        raise TrainingError(
            f"init: {settings.init} needs a rank of at most {min(weight.shape)} for {name}, got {rank}",
            where="training.lora.init",
            fix="give it a smaller rank under training.lora.ranks, or set init: kaiming",
        )
    if settings.init == "pissa":
        return _principal_part(weight, rank, scale=layer.scaling[ADAPTER], seed=seed)
    return _qr_part(weight, rank)


@contextmanager
def at_initial_weights(denoiser: nn.Module) -> Generator[None]:
    """Reset the trained adapter to its initial weights within the context."""
    # The data is exchanged and not copied, so that it comes back bit for bit.
    trained: list[tuple[nn.Parameter, Tensor]] = []
    for _, module in lora_modules(denoiser):
        layer = cast("Any", module)

        # The frozen adapter still has the initial weights, with the sign of the up matrix reversed.
        for factors, sign in ((layer.lora_A, 1.0), (layer.lora_B, -1.0)):
            weight: nn.Parameter = factors[ADAPTER].weight
            trained.append((weight, weight.data))
            weight.data = sign * factors[FROZEN_ADAPTER].weight.data
    try:
        yield
    finally:
        for weight, data in trained:
            weight.data = data


def _principal_part(weight: Tensor, rank: int, *, scale: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return (up, down) such that scale * up @ down is the part of the `rank` largest singular values."""
    left, values, right = largest_singular(weight, rank, seed=seed)
    root = (values / scale).sqrt()
    return left * root, root[:, None] * right


def _qr_part(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    columns, rows = torch.linalg.qr(weight)
    return columns[:, :rank], rows[:rank]


def largest_singular(weight: Tensor, rank: int, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `rank` largest singular values, descending, with their singular vectors.

    A matrix much larger than the rank is decomposed by subspace iteration (algorithm 4.4 of
    https://arxiv.org/abs/0909.4061), any other one exactly. `weight` is float32 (rows, columns), and `seed`
    chooses the first directions.

    Returns:
        Left vectors (rows, rank), values (rank,), right vectors (rank, columns).
    """
    num_directions = rank + _OVERSAMPLING
    if min(weight.shape) <= max(2 * num_directions, _FULL_SVD_SIZE):
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        return left[:, :rank], values[:rank], right[:rank]

    random = torch.Generator().manual_seed(hash_bits(63, seed, "directions"))
    basis = weight @ torch.randn(weight.shape[1], num_directions, generator=random).to(weight.device)
    for _ in range(_ITERATIONS):
        # Orthonormalised after each product, or all directions would converge to the largest one.
        basis = weight.T @ torch.linalg.qr(basis).Q
        basis = weight @ torch.linalg.qr(basis).Q
    basis = torch.linalg.qr(basis).Q

    left, values, right = torch.linalg.svd(basis.T @ weight, full_matrices=False)
    return basis @ left[:, :rank], values[:rank], right[:rank]
