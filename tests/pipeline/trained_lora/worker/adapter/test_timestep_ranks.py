"""T-LoRA: each sample trains the ranks of its noise level, files are ordinary LoRAs, and runs resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline.errors import TrainingError
from pipeline.recipe import LoraSettings
from pipeline.recipe.lora import TimestepRankSettings
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker.adapter.lora import lora_modules
from pipeline.trained_lora.worker.adapter.timestep_ranks import TimestepRanks
from tests.pipeline.trained_lora.runs import run_until
from tests.pipeline.trained_lora.worker.adapter.random_adapters import (
    CONVOLUTION,
    LINEAR,
    check_runs,
    random_adapters,
)

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

RANK, ALPHA = 8, 4.0
TIMESTEPS = (0, 1, 250, 333, 500, 749, 998, 999)


def ranks_of_the_paper(timestep: float, *, rank: int, min_rank: int, power: float) -> int:
    """Return the formula of the authors' `get_mask_by_timestep` in Python's numbers."""
    return int(((1000 - timestep) / 1000) ** power * (rank - min_rank)) + min_rank


def denoiser_of(base: Path) -> nn.Module:
    """Return a denoiser with random weights in the LoRAs of its linear layers and convolutions."""
    return random_adapters(base, LoraSettings(rank=RANK, alpha=ALPHA, conv_rank=RANK))


@pytest.mark.parametrize("name", [LINEAR, CONVOLUTION])
@pytest.mark.parametrize(("min_rank", "power"), [(1, 1.0), (3, 2.0), (2, 0.5)])
@torch.no_grad()
def test_each_sample_uses_the_first_ranks_of_its_noise_level(
    tiny_bases: dict[str, Path], name: str, min_rank: int, power: float
) -> None:
    denoiser = denoiser_of(tiny_bases["epsilon"])
    ranks = TimestepRanks(denoiser, TimestepRankSettings(min_rank=min_rank, power=power))
    layer: Any = dict(lora_modules(denoiser))[name]
    base, down, up = layer.get_base_layer(), layer.lora_A["default"].weight, layer.lora_B["default"].weight
    is_convolution = isinstance(base, nn.Conv2d)
    channels = base.in_channels if is_convolution else base.in_features
    shape = (len(TIMESTEPS), channels, 5, 6) if is_convolution else (len(TIMESTEPS), 7, channels)
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(3))

    with ranks.applied(torch.tensor(TIMESTEPS), 1000):
        output = layer(inputs)
    used = [ranks_of_the_paper(each, rank=RANK, min_rank=min_rank, power=power) for each in TIMESTEPS]
    assert {min(used), max(used)} == {min_rank, RANK}
    for index, number in enumerate(used):
        sample = inputs[index : index + 1]
        if is_convolution:
            hidden = nn.functional.conv2d(sample, down[:number], None, base.stride, base.padding)
            change = nn.functional.conv2d(hidden, up[:, :number])
        else:
            change = sample @ down[:number].T @ up[:, :number].T
        expected = base(sample) + ALPHA / RANK * change
        torch.testing.assert_close(output[index : index + 1], expected, rtol=1e-4, atol=1e-4)

    # Outside of a step, all ranks are used.
    torch.testing.assert_close(layer(inputs)[0], output[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(layer(inputs)[-1], output[-1], atol=1e-2)


def test_masked_ranks_get_no_gradient(tiny_bases: dict[str, Path]) -> None:
    denoiser = denoiser_of(tiny_bases["epsilon"])
    ranks = TimestepRanks(denoiser, TimestepRankSettings(min_rank=2))
    layer: Any = dict(lora_modules(denoiser))[LINEAR]
    inputs = torch.randn(2, 5, layer.in_features, generator=torch.Generator().manual_seed(3))
    with ranks.applied(torch.tensor([600, 900]), 1000):
        layer(inputs).square().sum().backward()

    # Of 8 ranks, the sample at 600 trains 4 and the one at 900 two.
    for norms in (
        layer.lora_A["default"].weight.grad.norm(dim=1),
        layer.lora_B["default"].weight.grad.norm(dim=0),
    ):
        assert [bool(norm > 0) for norm in norms] == [True] * 4 + [False] * 4


def test_a_layer_that_mixes_samples_is_refused(tiny_bases: dict[str, Path]) -> None:
    denoiser = denoiser_of(tiny_bases["epsilon"])
    ranks = TimestepRanks(denoiser, TimestepRankSettings())
    layer: Any = dict(lora_modules(denoiser))[LINEAR]
    with (
        ranks.applied(torch.tensor([600, 900]), 1000),
        pytest.raises(TrainingError, match=f"cannot mask {LINEAR}: it computes 10 rows for 2 samples"),
    ):
        layer(torch.zeros(10, layer.in_features))


def factors(project: Project, name: str) -> dict[str, Tensor]:
    job = project.job()
    run_until(job)
    return load_file(RunLayout(job.folder).exported / name)


LORA = {"rank": 4, "alpha": 2.0, "timestep_ranks": {"min_rank": 1}}


@pytest.mark.parametrize("prediction", ["epsilon", "klein"])
def test_a_stopped_run_resumes_bit_for_bit_and_recomputed_activations_have_the_same_ranks(
    make_project: Callable[..., Project], prediction: str
) -> None:
    project = make_project(steps=3, lora=LORA, prediction=prediction)
    check_runs(project)


def test_samples_of_pure_noise_train_the_first_rank_alone_and_the_file_is_an_ordinary_lora(
    make_project: Callable[..., Project],
) -> None:
    levels = {"min": 0.99, "max": 1.0}
    project = make_project(steps=2, lora=LORA, timesteps=levels)
    tensors = factors(project, "pytorch_lora_weights.safetensors")
    ups = [tensor for key, tensor in tensors.items() if key.endswith(".lora_B.weight")]
    assert ups
    for up in ups:
        assert up.shape[1] == 4
        assert [bool(norm > 0) for norm in up.norm(dim=0)] == [True, False, False, False]

    plain = project.changed("plain", lora=LoraSettings(rank=4, alpha=2.0))
    assert {key: tensor.shape for key, tensor in tensors.items()} == {
        key: tensor.shape for key, tensor in factors(plain, "pytorch_lora_weights.safetensors").items()
    }
