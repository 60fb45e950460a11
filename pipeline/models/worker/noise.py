"""Noise processes: noisy latents and targets at a timestep.

Letters of shapes: B samples, C latent channels, h and w latent edges.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, cast

from torch import Tensor

from pipeline.models.families import Family
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.worker.loading import component_class


class NoiseProcess(ABC):
    """The noise process of a base model."""

    def __init__(self, family: Family) -> None:
        self.family = family

    def load_scheduler(self) -> Any:
        """Return a training scheduler with the base model's noise schedule."""
        return component_class(self.family, "scheduler").from_pretrained(
            self.family.model.path, subfolder="scheduler", local_files_only=True
        )

    @abstractmethod
    def timesteps(self, scheduler: Any, levels: Tensor, latent_shape: tuple[int, int, int]) -> Tensor:
        """Return the timesteps (B,) of noise levels (B,), float64 in [0, 1), which they grow with.

        `latent_shape` is (C, h, w) of the samples; some families give larger images more noise.
        """

    @abstractmethod
    def signal_to_noise(self, scheduler: Any, timesteps: Tensor) -> Tensor:
        """Return the ratio (B,) of the variances of signal and noise at `timesteps` (B,)."""

    @abstractmethod
    def add_noise(self, scheduler: Any, latent: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the noisy latent (B, C, h, w) at `timesteps` (B,)."""

    @abstractmethod
    def target(self, scheduler: Any, latent: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the target of the denoiser's prediction, (B, C, h, w)."""


class BetaProcess(NoiseProcess):
    """Noise with a table of betas, with epsilon or v-prediction, as in `DDPMScheduler`."""

    def timesteps(self, scheduler: Any, levels: Tensor, latent_shape: tuple[int, int, int]) -> Tensor:
        """Return `floor(levels * num_train_timesteps)`, int64 (B,); the latent's shape does not matter."""
        return (levels * scheduler.config.num_train_timesteps).long()

    def signal_to_noise(self, scheduler: Any, timesteps: Tensor) -> Tensor:
        """Return alpha_bar / (1 - alpha_bar), float32."""
        signal = scheduler.alphas_cumprod.to(timesteps.device)[timesteps].float()
        return signal / (1.0 - signal)

    def add_noise(self, scheduler: Any, latent: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        return scheduler.add_noise(latent, noise, timesteps)

    def target(self, scheduler: Any, latent: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the noise, or for v-prediction the velocity of https://arxiv.org/abs/2202.00512."""
        if self.family.prediction_type() == "epsilon":
            return noise
        return scheduler.get_velocity(latent, noise, timesteps)


class FlowProcess(NoiseProcess):
    """Noise along a straight line: (1 - sigma) latent + sigma noise, with sigma from 0 to 1.

    A timestep is sigma times the schedule's number of timesteps, a float32 that need not be an integer.
    """

    def load_scheduler(self) -> Any:
        scheduler = super().load_scheduler()

        # A published schedule may be one for drawing, so a family may replace settings of the shift.
        noise = cast("FlowNoise", self.family.spec.noise)
        replaced = noise.training_schedule(self.family.model)
        return type(scheduler).from_config(scheduler.config, **replaced) if replaced else scheduler

    def timesteps(self, scheduler: Any, levels: Tensor, latent_shape: tuple[int, int, int]) -> Tensor:
        shifted = self.shift_sigma(scheduler, levels, latent_shape)
        return (shifted * scheduler.config.num_train_timesteps).float()

    def shift_sigma(self, scheduler: Any, sigma: Tensor, latent_shape: tuple[int, int, int]) -> Tensor:
        """Return sigma moved towards more noise, as the schedule does for pictures of that size.

        The fixed shift is (23) of https://arxiv.org/abs/2403.03206. The shift that depends on the number of
        tokens is the scheduler's own `time_shift`.
        """
        config = scheduler.config
        if not config.use_dynamic_shifting:
            return config.shift * sigma / (1.0 + (config.shift - 1.0) * sigma)
        return scheduler.time_shift(self.size_shift(scheduler, latent_shape), 1.0, sigma)

    def size_shift(self, scheduler: Any, latent_shape: tuple[int, int, int]) -> float:
        """Return the `mu` of `time_shift`, which is linear in the number of tokens."""
        # At module level, this import would add 2 s of CPU time to importing `pipeline.models.worker.family`.
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        config = scheduler.config
        return calculate_shift(
            self.num_tokens(latent_shape),
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )

    def num_tokens(self, latent_shape: tuple[int, int, int]) -> int:
        """Return the number of image tokens that the denoiser sees of a latent (C, h, w)."""
        return self.family.spec.latents.num_tokens(self.family.model, latent_shape)

    def signal_to_noise(self, scheduler: Any, timesteps: Tensor) -> Tensor:
        """Return ((1 - sigma) / sigma)^2."""
        sigma = timesteps / scheduler.config.num_train_timesteps
        return ((1.0 - sigma) / sigma) ** 2

    def add_noise(self, scheduler: Any, latent: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        sigma = (timesteps / scheduler.config.num_train_timesteps).to(latent.dtype)[:, None, None, None]
        return (1.0 - sigma) * latent + sigma * noise

    def target(self, scheduler: Any, latent: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return noise minus latent, which is the same at every timestep."""
        return noise - latent


class SolverFlowProcess(FlowProcess):
    """Flow matching for models published with another solver's configuration, which has a `flow_shift`."""

    def load_scheduler(self) -> Any:
        """Return a `FlowMatchEulerDiscreteScheduler` with the shift of the base model's solver."""
        config = self.family.scheduler_config
        shift = float(config.get("flow_shift") or config.get("shift") or 1.0)
        num_timesteps = int(config.get("num_train_timesteps", 1000))
        return component_class(self.family, "scheduler")(num_train_timesteps=num_timesteps, shift=shift)
