"""Two kinds of noise: by a table of betas (diffusion), and along a straight line (flow matching).

A family takes one of the two classes beside `DiffusersFamily`. B, C, h, w are as in `base`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.errors import FamilyError
from pipeline.models.families.base import BetaPrediction, Density, Prediction
from pipeline.models.families.diffusers_family import DiffusersFamily

if TYPE_CHECKING:
    from torch import Tensor


class BetaNoise(DiffusersFamily):
    """Noise by a table of betas, with epsilon or v-prediction, as `DDPMScheduler` has it."""

    def prediction_type(self) -> BetaPrediction:
        """`prediction_type` of the scheduler's configuration; epsilon where it says nothing.

        Raises:
            FamilyError: It is something else, such as "sample", or the schedule is EDM's.
        """
        path = str(self.folder / "scheduler" / "scheduler_config.json")
        schedule = str(self.scheduler_config.get("_class_name", ""))
        if schedule.startswith("EDM"):
            raise FamilyError(
                f"the noise schedule {schedule} cannot be trained",
                where=path,
                fix="use a base model with a table of betas, as DDIM, Euler and PNDM schedulers have it",
            )
        kind = self.scheduler_config.get("prediction_type", "epsilon")
        if kind not in ("epsilon", "v_prediction"):
            raise FamilyError(
                f"prediction_type {kind!r} cannot be trained",
                where=path,
                fix="use a base model with prediction_type epsilon or v_prediction",
            )
        return kind

    density: ClassVar[Density] = "uniform"

    def timestep_facts(self) -> dict[str, Any]:
        """Nothing but the schedule, which is a part of the denoiser's fingerprint."""
        return {}

    def timesteps(self, scheduler: Any, levels: Tensor, latent_shape: tuple[int, int, int]) -> Tensor:
        """The schedule's timesteps in equal shares of the levels, as int64, whatever the size."""
        return (levels * scheduler.config.num_train_timesteps).long()

    def signal_to_noise(self, scheduler: Any, timesteps: Tensor) -> Tensor:
        """alpha_bar / (1 - alpha_bar), float32."""
        signal = scheduler.alphas_cumprod.to(timesteps.device)[timesteps].float()
        return signal / (1.0 - signal)

    def add_noise(self, scheduler: Any, latent: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """`DDPMScheduler.add_noise`."""
        return scheduler.add_noise(latent, noise, timesteps)

    def target(self, scheduler: Any, latent: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """The noise, or the velocity (https://arxiv.org/abs/2202.00512) for v-prediction."""
        if self.prediction_type() == "epsilon":
            return noise
        return scheduler.get_velocity(latent, noise, timesteps)


class FlowNoise(DiffusersFamily):
    """Noise along a straight line: (1 - sigma) latent + sigma noise, 0 <= sigma <= 1.

    A timestep is sigma times the schedule's number of timesteps, as float32: it need not be whole.
    """

    density: ClassVar[Density] = "logit_normal"

    def prediction_type(self) -> Prediction:
        """Always flow."""
        return "flow"

    def timestep_facts(self) -> dict[str, Any]:
        """What the schedule's configuration says of the shift."""
        names = ("shift", "use_dynamic_shifting", "base_shift", "max_shift")
        names += ("base_image_seq_len", "max_image_seq_len", "time_shift_type")
        return {name: self.scheduler_config.get(name) for name in names}

    def timesteps(self, scheduler: Any, levels: Tensor, latent_shape: tuple[int, int, int]) -> Tensor:
        """The number of timesteps times sigma, which is the level after the schedule's shift; float32."""
        shifted = self.shift_sigma(scheduler, levels, latent_shape)
        return (shifted * scheduler.config.num_train_timesteps).float()

    def shift_sigma(self, scheduler: Any, sigma: Tensor, latent_shape: tuple[int, int, int]) -> Tensor:
        """Noise level sigma, moved towards more noise, as the schedule moves it for pictures of that size.

        The fixed shift is (23) of https://arxiv.org/abs/2403.03206; the scheduler's own `time_shift` is the
        one that depends on the number of tokens.
        """
        config = scheduler.config
        if not config.use_dynamic_shifting:
            return config.shift * sigma / (1.0 + (config.shift - 1.0) * sigma)
        return scheduler.time_shift(self.size_shift(scheduler, latent_shape), 1.0, sigma)

    def size_shift(self, scheduler: Any, latent_shape: tuple[int, int, int]) -> float:
        """The `mu` of `time_shift`: linear in the number of tokens, one a patch of the denoiser."""
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
        """Image tokens that the denoiser sees of a latent (C, h, w)."""
        edge = self.size_multiple() // self.factor
        return (latent_shape[1] // edge) * (latent_shape[2] // edge)

    def signal_to_noise(self, scheduler: Any, timesteps: Tensor) -> Tensor:
        """((1 - sigma) / sigma)^2."""
        sigma = timesteps / scheduler.config.num_train_timesteps
        return ((1.0 - sigma) / sigma) ** 2

    def add_noise(self, scheduler: Any, latent: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """The point (1 - sigma) latent + sigma noise."""
        sigma = (timesteps / scheduler.config.num_train_timesteps).to(latent.dtype)[:, None, None, None]
        return (1.0 - sigma) * latent + sigma * noise

    def target(self, scheduler: Any, latent: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """The noise minus the latent, at every timestep."""
        return noise - latent
