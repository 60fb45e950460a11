from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDPMScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)

from demo.tiny_models import TINY
from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families import Family
from pipeline.models.families.flux import FLUX
from pipeline.models.worker.family import WorkerFamily, load_family
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


def test_a_scheduler_without_settings_of_the_shift_uses_those_of_flux(line: FlowProcess) -> None:
    scheduler = UniPCMultistepScheduler(use_dynamic_shifting=True)
    assert "base_image_seq_len" not in scheduler.config
    shifts = [line.size_shift(scheduler, (4, edge, edge)) for edge in (32, 128)]
    assert shifts == pytest.approx([0.5, 1.15])


def with_scheduler(base: Path, folder: Path, values: dict[str, Any]) -> WorkerFamily:
    """Return the base model with this configuration of its scheduler, besides the class."""
    shutil.copytree(base, folder)
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({"_class_name": json.loads(file.read_text())["_class_name"], **values}))
    return load_family(folder)


@pytest.mark.parametrize(
    ("config", "shift", "num_timesteps"),
    [
        ({"flow_shift": 3.0, "shift": 2.0, "num_train_timesteps": 500}, 3.0, 500),
        ({"shift": 2.0}, 2.0, 1000),
        ({}, 1.0, 1000),
    ],
    ids=["flow_shift", "shift", "neither"],
)
def test_a_solver_is_trained_with_its_shift_and_number_of_timesteps(
    tmp_path: Path, config: dict[str, Any], shift: float, num_timesteps: int
) -> None:
    TINY["Sana"](tmp_path / "base")
    scheduler = with_scheduler(tmp_path / "base", tmp_path / "other", config).noise.load_scheduler()
    assert isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
    assert (scheduler.config.shift, scheduler.config.num_train_timesteps) == (shift, num_timesteps)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_noise_levels_targets_and_ratios_of_a_table_of_betas_are_those_of_ddpm(
    tiny_sd: Path, tmp_path: Path, prediction: str
) -> None:
    config = {"prediction_type": prediction, "beta_schedule": "scaled_linear", "num_train_timesteps": 500}
    noise_process = with_scheduler(tiny_sd, tmp_path / "other", config).noise
    scheduler = noise_process.load_scheduler()
    ddpm = DDPMScheduler.from_pretrained(tmp_path / "other" / "scheduler")
    assert len(scheduler.alphas_cumprod) == 500
    times = noise_process.timesteps(
        scheduler, torch.tensor([0.0, 0.5, 0.9999], dtype=torch.float64), (4, 8, 8)
    )
    assert times.tolist() == [0, 250, 499]
    assert times.dtype == torch.int64

    latent, noise = torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    signal = ddpm.alphas_cumprod[times]
    torch.testing.assert_close(noise_process.signal_to_noise(scheduler, times), signal / (1 - signal))
    rates = [rate.sqrt()[:, None, None, None] for rate in (signal, 1 - signal)]
    noisy = noise_process.add_noise(scheduler, latent, noise, times)
    torch.testing.assert_close(noisy, rates[0] * latent + rates[1] * noise)
    target = noise_process.target(scheduler, latent, noise, times)
    velocity = rates[0] * noise - rates[1] * latent
    torch.testing.assert_close(target, noise if prediction == "epsilon" else velocity)
