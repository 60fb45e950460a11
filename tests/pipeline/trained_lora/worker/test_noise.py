from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling

from demo.tiny_models import make_tiny_sd3
from pipeline.models.worker.family import load_family
from pipeline.recipe import NoiseSettings, TimestepSettings, TrainingSettings
from pipeline.trained_lora.worker.noise import NoiseSampler, SlotNoise, make_noise_scheduler, noise_levels

SHAPE = (4, 16, 24)


def draw(step: int = 3, slot: int = 1, *, seed: int = 7, **noise: Any) -> SlotNoise:
    return NoiseSampler(TrainingSettings(seed=seed, noise=NoiseSettings(**noise))).sample((step, slot), SHAPE)


def test_noise_depends_only_on_seed_step_and_slot() -> None:
    first = draw(offset=0.1, input_perturbation=0.1)
    again = draw(offset=0.1, input_perturbation=0.1)
    assert np.array_equal(first.target, again.target)
    assert np.array_equal(first.input, again.input)
    for other in (draw(4), draw(3, 2), draw(seed=8)):
        assert not np.array_equal(other.target, draw().target)


def test_plain_noise_is_both_input_and_target() -> None:
    drawn = draw()
    assert drawn.target is drawn.input
    assert drawn.target.dtype == np.float32
    assert drawn.target.shape == SHAPE


def test_an_offset_adds_one_value_per_channel() -> None:
    difference = (draw(offset=0.25).target - draw().target) / 0.25
    for channel in difference:
        assert np.ptp(channel) < 1e-5
    assert len({round(float(channel.mean()), 3) for channel in difference}) == SHAPE[0]
    means = [float((draw(step, offset=1.0).target - draw(step).target)[0, 0, 0]) for step in range(400)]
    # The mean of 400 normals exceeds 0.2 for one seed in 16,000; their deviation is off by 0.15 as rarely.
    assert abs(np.mean(means)) < 0.2
    assert abs(np.std(means) - 1) < 0.15


def test_a_perturbation_changes_the_input_but_not_the_target() -> None:
    drawn = draw(input_perturbation=0.1)
    assert np.array_equal(drawn.target, draw().target)
    more = (drawn.input - drawn.target) / 0.1
    assert abs(float(more.std()) - 1) < 0.1
    assert abs(float(np.corrcoef(more.ravel(), drawn.target.ravel())[0, 1])) < 0.1


def test_betas_are_rescaled_as_in_algorithm_1_of_the_paper() -> None:
    class Beta:
        """A family whose schedule is Stable Diffusion's."""

        @property
        def noise(self) -> Beta:
            return self

        def load_scheduler(self) -> DDPMScheduler:
            return DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")

    plain: Any = make_noise_scheduler(Beta(), TrainingSettings())
    rescaled: Any = make_noise_scheduler(
        Beta(), TrainingSettings(noise=NoiseSettings(zero_terminal_snr=True))
    )
    signal = plain.alphas_cumprod.double().sqrt()
    expected = (signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])
    torch.testing.assert_close(
        rescaled.alphas_cumprod.double()[:-1], expected[:-1] ** 2, rtol=1e-3, atol=1e-6
    )
    assert float(rescaled.alphas_cumprod[-1]) < 1e-7 < float(plain.alphas_cumprod[-1])


def test_the_range_of_levels_applies_before_the_shift_as_the_recipe_describes(tmp_path: Path) -> None:
    """Stable Diffusion 3 has a shift of 3, so that a level of 0.5 gets 3 * 0.5 / (1 + 2 * 0.5) = 0.75."""
    make_tiny_sd3(tmp_path)
    family, settings = load_family(tmp_path), TimestepSettings(density="uniform", max=0.5)
    drawn = noise_levels(
        torch.tensor([1.0 - 2.0**-53], dtype=torch.float64), settings, family.spec.noise.density
    )
    timesteps = family.noise.timesteps(family.noise.load_scheduler(), drawn, (16, 128, 128))
    assert drawn.item() == pytest.approx(0.5)
    assert timesteps.item() == pytest.approx(750.0, abs=1e-3)

    lowest, highest = (TimestepSettings.model_fields[key].description or "" for key in ("min", "max"))
    assert "before the shift" in lowest
    assert "before the shift" in highest
    assert "up to 0.75" in highest


UNIFORM = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
"""Centres of equal probability intervals; they map to the quantiles of a density."""


def levels(**settings: Any) -> torch.Tensor:
    return noise_levels(UNIFORM, TimestepSettings(**settings), "uniform")


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        (
            {"density": "logit_normal"},
            {"weighting_scheme": "logit_normal", "logit_mean": 0.0, "logit_std": 1.0},
        ),
        (
            {"density": "logit_normal", "location": 0.5, "scale": 0.7},
            {"weighting_scheme": "logit_normal", "logit_mean": 0.5, "logit_std": 0.7},
        ),
        ({"density": "mode"}, {"weighting_scheme": "mode", "mode_scale": 1.29}),
        ({"density": "mode", "mode_scale": -0.5}, {"weighting_scheme": "mode", "mode_scale": -0.5}),
        ({"density": "uniform"}, {"weighting_scheme": "none"}),
    ],
    ids=str,
)
def test_densities_have_the_quantiles_of_diffusers_samples(
    settings: dict[str, Any], theirs: dict[str, Any]
) -> None:
    ours = levels(**settings)
    assert bool((ours.diff() >= 0).all()), "higher draws are noisier"
    assert 0.0 <= float(ours.min()) <= float(ours.max()) < 1.0
    arguments = {"logit_mean": None, "logit_std": None, "mode_scale": None, **theirs}
    generator = torch.Generator().manual_seed(5)
    drawn = compute_density_for_timestep_sampling(batch_size=200_000, generator=generator, **arguments)
    shares = torch.linspace(0.02, 0.98, 25, dtype=torch.float64)
    # The median of 200,000 samples has a standard error of 0.0011; 0.008 is 7 times that.
    torch.testing.assert_close(ours.quantile(shares), drawn.double().quantile(shares), rtol=0, atol=8e-3)


def test_levels_stay_in_range_and_auto_selects_the_model_s_density() -> None:
    inside = levels(density="logit_normal", min=0.25, max=0.5)
    assert 0.25 <= float(inside.min()) <= float(inside.max()) <= 0.5
    own = noise_levels(UNIFORM, TimestepSettings(), "logit_normal")
    assert torch.equal(own, levels(density="logit_normal"))
    assert torch.equal(levels(), UNIFORM)
    ends = noise_levels(torch.tensor([0.0, 1 - 2**-53]).double(), TimestepSettings(), "logit_normal")
    assert float(ends[0]) == 0.0
    assert float(ends[1]) == math.nextafter(1.0, 0.0), "the largest number below 1"
    assert float(noise_levels(torch.zeros(1).double(), TimestepSettings(density="mode"), "uniform")) == 0.0


def test_the_recipe_s_shift_replaces_the_scheduler_s() -> None:
    class Flow:
        """A family whose shift depends on the image's size."""

        @property
        def noise(self) -> Flow:
            return self

        def load_scheduler(self) -> FlowMatchEulerDiscreteScheduler:
            return FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=True)

    settings = TrainingSettings(timesteps=TimestepSettings(shift=3.0))
    config = make_noise_scheduler(Flow(), settings).config
    assert (config.shift, config.use_dynamic_shifting) == (3.0, False)
    assert make_noise_scheduler(Flow(), TrainingSettings()).config.use_dynamic_shifting
