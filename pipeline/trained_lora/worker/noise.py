"""The noise of a training step, how much of it, and the schedule it follows.

B is the number of samples, C, h, w are the latent's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pipeline.trained_lora.plan.seeding import stream

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.models.families import Density
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import TimestepSettings, TrainingSettings

Array: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True)
class DrawnNoise:
    """One slot's noise, float32 (C, h, w).

    Attributes:
        target: What the denoiser is asked for, or its target is made of.
        input: What is mixed into the latent.
    """

    target: Array
    input: Array


class Noise:
    """Draws noise that depends on (seed, step, slot) alone; safe to use from several threads.

    target = normal + offset * normal, the second one number a channel
                                              (https://www.crosslabs.org/blog/diffusion-with-offset-noise)
    input  = target + input_perturbation * normal          (https://arxiv.org/abs/2301.11706)
    """

    def __init__(self, settings: TrainingSettings) -> None:
        """Take the seed and the settings of `noise`."""
        self._seed = settings.seed
        self._settings = settings.noise

    def draw(self, step: int, slot: int, shape: tuple[int, ...]) -> DrawnNoise:
        """The noise of `slot` in the global batch of `step`, for a latent of `shape`."""
        target = self._normal("noise", step, slot, shape)
        if self._settings.offset > 0.0:
            channels = self._normal("noise offset", step, slot, (shape[0], 1, 1))
            target = _sum(target, self._settings.offset, channels)
        if self._settings.input_perturbation == 0.0:
            return DrawnNoise(target, target)
        more = self._normal("input perturbation", step, slot, shape)
        return DrawnNoise(target, _sum(target, self._settings.input_perturbation, more))

    def _normal(self, purpose: str, step: int, slot: int, shape: tuple[int, ...]) -> Array:
        return stream(self._seed, purpose, step, slot).standard_normal(shape, dtype=np.float32)


def _sum(noise: Array, strength: float, more: Array) -> Array:
    return (noise + np.float32(strength) * more).astype(np.float32, copy=False)


def noise_levels(uniform: Tensor, settings: TimestepSettings, own: Density) -> Tensor:
    """Noise levels of the recipe's density, laid over its range; higher for higher draws.

    Args:
        uniform: (B,) float64 in [0, 1).
        settings: Density and range.
        own: The base model's density, for "auto".

    Returns:
        (B,) float64 in [0, 1). The densities are those of 3.1 in https://arxiv.org/abs/2403.03206.
    """
    density = own if settings.density == "auto" else settings.density
    if density == "logit_normal":
        levels = torch.sigmoid(settings.location + settings.scale * torch.special.ndtri(uniform))
    elif density == "mode":
        # The paper's f(u; s) falls with u; of 1 - u it rises.
        steep = torch.cos(math.pi / 2 * (1 - uniform)) ** 2 - uniform
        levels = uniform - settings.mode_scale * steep
    else:
        levels = uniform
    below_one = 1.0 - 2.0**-53
    return (settings.min + (settings.max - settings.min) * levels).clamp(0.0, below_one)


def make_noise_scheduler(family: WorkerFamily, settings: TrainingSettings) -> Any:
    """The family's training scheduler, changed as the recipe asks.

    Betas are rescaled to zero terminal SNR by diffusers (algorithm 1 of https://arxiv.org/abs/2305.08891); a
    `timesteps.shift` takes the place of the schedule's own, also of one that depends on the image's size.
    """
    scheduler = family.noise.load_scheduler()
    changed: dict[str, Any] = {}
    if settings.noise.zero_terminal_snr:
        changed["rescale_betas_zero_snr"] = True
    if settings.timesteps.shift is not None:
        changed |= {"shift": settings.timesteps.shift, "use_dynamic_shifting": False}
    return type(scheduler).from_config(scheduler.config, **changed) if changed else scheduler
