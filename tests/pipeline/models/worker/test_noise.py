from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families import Family
from pipeline.models.families.flux import FLUX
from pipeline.models.worker.noise import FlowProcess

UNIFORM = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000


@pytest.fixture
def line() -> FlowProcess:
    """Return flow matching for latents with 2x2 patches as tokens; it reads no file."""
    return FlowProcess(Family(FLUX, ModelFolder(Path())))


def test_without_a_shift_a_timestep_is_the_noise_level(line: FlowProcess) -> None:
    timesteps = line.timesteps(FlowMatchEulerDiscreteScheduler(), UNIFORM, (4, 8, 8))
    assert timesteps.dtype == torch.float32
    torch.testing.assert_close(timesteps, (1000 * UNIFORM).float())


def test_a_fixed_shift_is_the_one_of_the_schedules_own_sigmas(line: FlowProcess) -> None:
    plain, shifted = (FlowMatchEulerDiscreteScheduler(shift=shift) for shift in (1.0, 3.0))
    actual = line.shift_sigma(shifted, plain.sigmas[:-1].double(), (4, 8, 8))
    torch.testing.assert_close(actual.float(), shifted.sigmas[:-1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("edge", "mu"), [(32, 0.5), (128, 1.15), (64, 0.63)])
def test_a_dynamic_shift_grows_with_the_number_of_tokens(line: FlowProcess, edge: int, mu: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    sigma = torch.tensor([0.0, 0.1, 0.5, 0.9], dtype=torch.float64)
    actual = line.shift_sigma(scheduler, sigma, (4, edge, edge))
    e = torch.tensor(mu, dtype=torch.float64).exp()
    torch.testing.assert_close(actual, e * sigma / (e * sigma + 1 - sigma), rtol=0, atol=1e-6)


def test_the_noisy_latent_lies_on_the_line_and_its_slope_is_the_target(line: FlowProcess) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    latent, noise = torch.randn(2, 2, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    times = torch.tensor([250.0, 750.0])
    noisy = line.add_noise(scheduler, latent, noise, times)
    for index, sigma in enumerate((0.25, 0.75)):
        expected = (1 - sigma) * latent[index] + sigma * noise[index]
        torch.testing.assert_close(noisy[index], expected, rtol=0, atol=1e-6)
    assert torch.equal(line.target(scheduler, latent, noise, times), noise - latent)
    torch.testing.assert_close(line.signal_to_noise(scheduler, times), torch.tensor([9.0, 1 / 9]))
