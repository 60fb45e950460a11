from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import DDPMScheduler

from pipeline.recipe import NoiseSettings, TrainingSettings
from pipeline.training.noise import DrawnNoise, Noise, make_noise_scheduler

SHAPE = (4, 16, 24)


def draw(step: int = 3, slot: int = 1, *, seed: int = 7, **noise: Any) -> DrawnNoise:
    return Noise(TrainingSettings(seed=seed, noise=NoiseSettings(**noise))).draw(step, slot, SHAPE)


def test_noise_depends_on_seed_step_and_slot_alone() -> None:
    first = draw(offset=0.1, input_perturbation=0.1)
    again = draw(offset=0.1, input_perturbation=0.1)
    assert np.array_equal(first.target, again.target)
    assert np.array_equal(first.input, again.input)
    for other in (draw(4), draw(3, 2), draw(seed=8)):
        assert not np.array_equal(other.target, draw().target)


def test_plain_noise_is_what_is_mixed_in_and_asked_for() -> None:
    drawn = draw()
    assert drawn.target is drawn.input
    assert drawn.target.dtype == np.float32
    assert drawn.target.shape == SHAPE


def test_an_offset_is_one_number_a_channel_beside_the_plain_noise() -> None:
    difference = (draw(offset=0.25).target - draw().target) / 0.25
    for channel in difference:
        assert np.ptp(channel) < 1e-5
    assert len({round(float(channel.mean()), 3) for channel in difference}) == SHAPE[0]
    means = [float((draw(step, offset=1.0).target - draw(step).target)[0, 0, 0]) for step in range(400)]
    # The mean of 400 normals lies beyond 0.2 once in 16,000 seeds, their deviation is off by 0.15 as rarely.
    assert abs(np.mean(means)) < 0.2
    assert abs(np.std(means) - 1) < 0.15


def test_a_perturbation_is_in_the_input_and_not_in_what_is_asked_for() -> None:
    drawn = draw(input_perturbation=0.1)
    assert np.array_equal(drawn.target, draw().target)
    more = (drawn.input - drawn.target) / 0.1
    assert abs(float(more.std()) - 1) < 0.1
    assert abs(float(np.corrcoef(more.ravel(), drawn.target.ravel())[0, 1])) < 0.1


def test_betas_are_rescaled_as_in_algorithm_1_of_the_paper() -> None:
    class Beta:
        """A family whose schedule is Stable Diffusion's."""

        def load_noise_scheduler(self) -> DDPMScheduler:
            return DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")

    plain: Any = make_noise_scheduler(Beta(), NoiseSettings())
    rescaled: Any = make_noise_scheduler(Beta(), NoiseSettings(zero_terminal_snr=True))
    signal = plain.alphas_cumprod.double().sqrt()
    expected = (signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])
    torch.testing.assert_close(
        rescaled.alphas_cumprod.double()[:-1], expected[:-1] ** 2, rtol=1e-3, atol=1e-6
    )
    assert float(rescaled.alphas_cumprod[-1]) < 1e-7 < float(plain.alphas_cumprod[-1])
