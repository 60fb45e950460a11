"""The noise of a training step, the distribution of noise levels, and the noise scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pipeline.trained_lora.plan.random_streams import stream

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.models.families import Density
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import TimestepSettings, TrainingSettings

Array: TypeAlias = npt.NDArray[np.float32]

Place: TypeAlias = tuple[int | str, ...]
"""Origin of a slot's noise, besides the seed: its step and index, or its pair, epoch and occurrence."""


@dataclass(frozen=True)
class SlotNoise:
    """Noise of one slot, float32 in the latent's shape (C, h, w).

    Attributes:
        target: Noise that the denoiser's target is computed from.
        input: Noise that is mixed into the latent.
    """

    target: Array
    input: Array


class NoiseSampler:
    """Samples noise that depends only on the seed and a place in the run; safe to use from several threads.

    target = normal + offset * normal, the second with one value per channel
                                              (https://www.crosslabs.org/blog/diffusion-with-offset-noise)
    input  = target + input_perturbation * normal          (https://arxiv.org/abs/2301.11706)
    """

    def __init__(self, settings: TrainingSettings) -> None:
        self._seed = settings.seed
        self._settings = settings.noise

    def sample(self, place: Place, shape: tuple[int, int, int]) -> SlotNoise:
        """Return the noise at `place` for a latent of `shape` (C, h, w)."""
        target = self._normal("noise", place, shape)
        if self._settings.offset > 0.0:
            channels = self._normal("noise offset", place, (shape[0], 1, 1))
            target = _add_scaled(target, self._settings.offset, channels)
        if self._settings.input_perturbation == 0.0:
            return SlotNoise(target, target)

        perturbation = self._normal("input perturbation", place, shape)
        return SlotNoise(target, _add_scaled(target, self._settings.input_perturbation, perturbation))

    def _normal(self, purpose: str, place: Place, shape: tuple[int, ...]) -> Array:
        return stream(self._seed, purpose, *place).standard_normal(shape, dtype=np.float32)


def _add_scaled(noise: Array, scale: float, other: Array) -> Array:
    return (noise + np.float32(scale) * other).astype(np.float32, copy=False)


def noise_levels(uniform: Tensor, settings: TimestepSettings, family_density: Density) -> Tensor:
    """Map uniform random numbers to noise levels of the recipe's density and range.

    Both are (B,) float64 in [0, 1). The densities are from section 3.1 of https://arxiv.org/abs/2403.03206.
    The map is increasing. `NoiseProcess.timesteps` applies the shift of a flow-matching schedule to its
    result. The density "auto" selects `family_density`.
    """
    density = family_density if settings.density == "auto" else settings.density
    if density == "logit_normal":
        levels = torch.sigmoid(settings.location + settings.scale * torch.special.ndtri(uniform))
    elif density == "mode":
        # The paper's f(u; s) decreases in u, so 1 - u is inserted.
        curvature = torch.cos(math.pi / 2 * (1 - uniform)) ** 2 - uniform
        levels = uniform - settings.mode_scale * curvature
    elif density == "parabola":
        levels = _parabola_levels(uniform)
    else:
        levels = uniform

    # Rounding may give 1, and a schedule of N timesteps, numbered from 0, has no timestep N.
    below_one = 1.0 - 2.0**-53
    return (settings.min + (settings.max - settings.min) * levels).clamp(0.0, below_one)


def _parabola_levels(uniform: Tensor) -> Tensor:
    """Map uniform random numbers to levels x with a density proportional to 2 - 7.7 (x - 1/2)^2.

    The density is that of https://github.com/lodestone-rock/flow, `create_distribution`.
    """
    # With y = x - 1/2 and area = 2 - 7.7 / 12, the distribution function is 1/2 + (2 y - 7.7 y^3 / 3) / area.
    # Its inverse is the root of a cubic equation between -1/2 and 1/2, in Viete's trigonometric form.
    height, curvature = 2.0, 7.7
    area = height - curvature / 12
    amplitude = 2.0 * math.sqrt(height / curvature)
    sine = 12.0 * area / (curvature * amplitude**3) * (uniform - 0.5)
    return 0.5 + amplitude * torch.sin(torch.asin(sine) / 3.0)


def make_noise_scheduler(family: WorkerFamily, settings: TrainingSettings) -> Any:
    """Return the family's noise scheduler for training, with the recipe's changes."""
    scheduler = family.noise.load_scheduler()
    changes: dict[str, Any] = {}
    if settings.noise.zero_terminal_snr:
        # Algorithm 1 of https://arxiv.org/abs/2305.08891.
        changes["rescale_betas_zero_snr"] = True
    if settings.timesteps.shift is not None:
        # The recipe's shift also replaces a shift that depends on the image's size.
        changes |= {"shift": settings.timesteps.shift, "use_dynamic_shifting": False}
    return type(scheduler).from_config(scheduler.config, **changes) if changes else scheduler
