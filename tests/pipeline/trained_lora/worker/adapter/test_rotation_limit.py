"""The limit of OFT's blocks, which keeps them rotations at high learning rates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.models.worker.family import load_family
from pipeline.recipe import LoraSettings
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker.adapter.lora import add_lora, lora_modules, trainable_weights
from pipeline.trained_lora.worker.adapter.rotation_limit import MAX_NORM, RotationLimit, norm_bounds
from pipeline.trained_lora.worker.checkpoint import checkpoint_path, load_checkpoint
from tests.pipeline.trained_lora.runs import run_until

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

SIZE = 16


def skew(numbers: Tensor, size: int) -> np.ndarray[Any, Any]:
    """Return the skew-symmetric matrices of blocks with these upper triangles, in float64."""
    blocks = np.zeros((len(numbers), size, size))
    blocks[:, *np.triu_indices(size, 1)] = numbers.detach().double().numpy()
    return blocks - blocks.swapaxes(1, 2)


def spectral_norms(numbers: Tensor, size: int) -> np.ndarray[Any, Any]:
    return np.linalg.norm(skew(numbers, size), 2, axis=(1, 2))


@pytest.mark.parametrize("size", [2, 3, 8, 32, 100])
@pytest.mark.parametrize("factor", [1e-12, 1.0, 1e6])
def test_the_bound_is_at_least_the_norm_and_at_most_its_multiple(size: int, factor: float) -> None:
    random = torch.Generator().manual_seed(size)
    numbers = factor * torch.randn(20, size * (size - 1) // 2, generator=random)
    # A single pair of singular values, for which the bound is exact.
    numbers[0, 1:] = 0
    exact = spectral_norms(numbers, size)
    bounds = norm_bounds(numbers, size).double().numpy()
    assert np.all(bounds >= exact * (1 - 1e-5))
    assert np.all(bounds <= exact * (size // 2) ** (1 / 8) * (1 + 1e-5))
    np.testing.assert_allclose(bounds[0], exact[0], rtol=1e-5)


def test_a_block_of_zeros_has_the_norm_zero() -> None:
    assert norm_bounds(torch.zeros(2, 6), 4).tolist() == [0.0, 0.0]


def network_of(base: Path) -> nn.Module:
    """Return a denoiser with random rotations, small ones and ones beyond the limit."""
    family = load_family(base)
    denoiser = cast("Any", family.denoiser.load("float32", "cpu"))
    lora = LoraSettings(kind="oft", oft_block_size=SIZE)
    add_lora(denoiser, lora, targets=family.lora_targets(), seed=1)
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in trainable_weights(denoiser):
            weight.copy_(torch.randn(weight.shape, generator=random))
            weight[::2] *= 0.01
    return denoiser


def rotations_of(network: nn.Module) -> dict[str, Any]:
    return {name: cast("Any", layer).oft_R["default"] for name, layer in lora_modules(network)}


def test_blocks_beyond_the_limit_become_rotations_and_others_keep_every_bit(
    tiny_bases: dict[str, Path],
) -> None:
    network = network_of(tiny_bases["epsilon"])
    before = {name: each.weight.detach().clone() for name, each in rotations_of(network).items()}
    RotationLimit([network]).apply(torch.tensor(False))
    assert all(torch.equal(each.weight, before[name]) for name, each in rotations_of(network).items())

    RotationLimit([network]).apply()
    for name, each in rotations_of(network).items():
        assert torch.equal(each.weight[::2], before[name][::2])
        ratios = each.weight[1::2] / before[name][1::2]
        assert torch.allclose(ratios, ratios[:, :1].expand_as(ratios), rtol=1e-5)
        assert spectral_norms(each.weight, SIZE).max() <= MAX_NORM
    layer: Any = next(layer for _, layer in lora_modules(network))
    matrix = layer.get_delta_weight("default").detach().double().numpy()
    lengths = np.linalg.svd(matrix, compute_uv=False)
    assert 1 - MAX_NORM**4 - 1e-6 <= lengths.min() < 0.99
    assert lengths.max() <= 1 + 1e-6


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_the_limit_holds_at_a_learning_rate_at_which_the_series_would_diverge(
    make_project: Callable[..., Project], ema_decay: float | None
) -> None:
    lora = {"kind": "oft", "oft_block_size": SIZE}
    settings = {"steps": 3, "learning_rate": 0.5, "lr_scheduler": "constant", "ema_decay": ema_decay}
    job = make_project(lora=lora, sample_every=0, **settings).job()
    run_until(job)
    state = load_checkpoint(checkpoint_path(RunLayout(job.folder).checkpoints, 3), job.run)
    norms = [spectral_norms(each, SIZE).max() for name, each in state.adapter.items() if "oft_R" in name]
    assert norms
    assert max(norms) <= MAX_NORM * (1 + 1e-6)
    assert max(norms) > MAX_NORM / 2
