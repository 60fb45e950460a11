"""The noise of a training step, and the schedule it follows.

C, h, w are the latent's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.training.seeding import stream

if TYPE_CHECKING:
    from pipeline.families import Family
    from pipeline.recipe import NoiseSettings, TrainingSettings

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


def make_noise_scheduler(family: Family, settings: NoiseSettings) -> Any:
    """The family's training scheduler, with betas rescaled to zero terminal SNR where the recipe asks for it.

    The rescaling is diffusers' (algorithm 1 of https://arxiv.org/abs/2305.08891).
    """
    scheduler = family.load_noise_scheduler()
    if not settings.zero_terminal_snr:
        return scheduler
    return type(scheduler).from_config(scheduler.config, rescale_betas_zero_snr=True)
