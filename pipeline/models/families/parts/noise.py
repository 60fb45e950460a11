"""Noise processes: diffusion with a table of betas, and flow matching along a straight line."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.errors import FamilyError
from pipeline.models.diffusers_folder import ModelFolder

BetaPrediction = Literal["epsilon", "v_prediction"]
"""Target of a model with a table of betas: the noise, or the velocity of https://arxiv.org/abs/2202.00512."""

Prediction = Literal[BetaPrediction, "flow"]
"""Output of the denoiser; a flow is noise minus latent: https://arxiv.org/abs/2210.02747."""

Density = Literal["uniform", "logit_normal", "mode", "parabola"]
"""Distribution of the noise levels drawn in training, from 0 (no noise) to 1 (only noise).

A parabola is Chroma's: symmetric like a logit-normal density, with more weight on both ends.
"""

# Keys of a flow schedule's configuration that decide how noise levels become timesteps.
_SHIFT_KEYS = (
    "shift",
    "use_dynamic_shifting",
    "base_shift",
    "max_shift",
    "base_image_seq_len",
    "max_image_seq_len",
    "time_shift_type",
)

FLUX_SHIFT: Mapping[str, Any] = {
    "use_dynamic_shifting": True,
    "time_shift_type": "exponential",
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
"""FLUX.1's shift, which grows with the image: e^0.5 at 256 px and e^1.15 at 1,024 px."""


ZERO_SNR_DRAWING: Mapping[str, Any] = {
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
    "clip_sample": False,
}
"""Settings with which diffusers' DDIMScheduler draws on the schedule of `noise.zero_terminal_snr`.

Drawing must start at the last timestep, of noise alone: sections 3.1 and 3.3 of https://arxiv.org/abs/2305.08891.
DDIM clips latents unless a configuration says otherwise.
"""


RESCALING_SCHEDULERS = frozenset(
    [
        *("DDIMScheduler", "DDIMParallelScheduler", "DDIMInverseScheduler", "CogVideoXDDIMScheduler"),
        *("DDPMScheduler", "DDPMParallelScheduler", "EulerDiscreteScheduler"),
        *("EulerAncestralDiscreteScheduler", "DPMSolverMultistepScheduler", "CogVideoXDPMScheduler"),
        *("UniPCMultistepScheduler", "LCMScheduler", "TCDScheduler"),
    ]
)
"""Schedulers of diffusers that read `rescale_betas_zero_snr`; the others ignore it and draw without it."""


NO_SHIFT: Mapping[str, Any] = {"use_dynamic_shifting": False, "shift": 1.0}
"""Settings of a schedule that leaves noise levels where a density puts them."""


@dataclass(frozen=True)
class NoiseSpec(ABC):
    """A noise process.

    Attributes:
        process: Import path of the noise process below `pipeline.models.worker`.
        density: Distribution of noise levels unless the recipe names one.
        own_shift: Why `training.timesteps.shift` cannot replace the schedule's shift; empty if it can.
    """

    process: str
    density: Density
    own_shift: str = ""

    @abstractmethod
    def prediction_type(self, model: ModelFolder) -> Prediction:
        """Return the denoiser's prediction type, according to the scheduler's configuration."""

    def loses_zero_snr(self, model: ModelFolder) -> bool:
        """Return True if training reads a zero terminal SNR that the model's own scheduler ignores."""
        return False

    @abstractmethod
    def timestep_facts(self, model: ModelFolder) -> dict[str, Any]:
        """Return everything that decides the timestep of a noise level, JSON-serialisable."""


@dataclass(frozen=True)
class BetaNoise(NoiseSpec):
    """Noise with a table of betas, with epsilon or v-prediction, as in `DDPMScheduler`."""

    process: str = "noise:BetaProcess"
    density: Density = "uniform"

    def prediction_type(self, model: ModelFolder) -> BetaPrediction:
        """Return the scheduler's prediction type, or raise FamilyError if training does not support it."""
        config, path = model.config("scheduler"), str(model.config_file("scheduler"))
        schedule = str(config.get("_class_name", ""))
        if schedule.startswith("EDM"):
            raise FamilyError(
                f"the noise schedule {schedule} is not supported for training",
                where=path,
                fix="use a base model with a DDIM, DDPM, Euler or PNDM scheduler in "
                "scheduler/scheduler_config.json",
            )
        prediction = config.get("prediction_type", "epsilon")
        if prediction not in ("epsilon", "v_prediction"):
            raise FamilyError(
                f"prediction_type must be epsilon or v_prediction, got {prediction!r}",
                where=path,
                fix="use a base model with epsilon or v-prediction",
            )
        return prediction

    def loses_zero_snr(self, model: ModelFolder) -> bool:
        # Drawing the image from a prediction of noise would divide by a signal of zero.
        config = model.config("scheduler")
        is_rescaled = bool(config.get("rescale_betas_zero_snr"))
        if not is_rescaled or self.prediction_type(model) != "v_prediction":
            return False
        _, scheduler = model.index["scheduler"]
        return scheduler not in RESCALING_SCHEDULERS

    def timestep_facts(self, model: ModelFolder) -> dict[str, Any]:
        # The schedule is part of the denoiser's fingerprint.
        return {}

    def last_timestep_with_signal(self, model: ModelFolder) -> int:
        """Return the last timestep at which a noisy latent contains any of the image, from 0.

        A schedule of zero terminal SNR (https://arxiv.org/abs/2305.08891) has a later one, of noise alone.
        """
        # At module level, NumPy would slow down the commands that only read declarations.
        import numpy as np

        config = model.config("scheduler")
        num_timesteps = int(config.get("num_train_timesteps", 1000))
        start, end = float(config.get("beta_start", 0.0001)), float(config.get("beta_end", 0.02))
        schedule = config.get("beta_schedule", "linear")

        # The arithmetic of diffusers' DDPMScheduler, which trains whatever class the configuration names.
        if (trained := config.get("trained_betas")) is not None:
            betas = np.asarray(trained, dtype=np.float32)
        elif schedule == "linear":
            betas = np.linspace(start, end, num_timesteps, dtype=np.float32)
        elif schedule == "scaled_linear":
            betas = np.linspace(start**0.5, end**0.5, num_timesteps, dtype=np.float32) ** 2
        elif schedule == "sigmoid":
            logits = np.linspace(-6.0, 6.0, num_timesteps, dtype=np.float32)
            betas = (end - start) / (1.0 + np.exp(-logits)) + start
        else:
            # The cosine schedules limit beta to 0.999 and never reach zero.
            betas = np.zeros(num_timesteps, dtype=np.float32)

        # The signal is zero from the first beta of 1, and where the product underflows.
        alphas_bar = np.cumprod(np.float32(1.0) - betas, dtype=np.float64).astype(np.float32)
        last = int(np.count_nonzero(alphas_bar)) - 1
        return min(last, num_timesteps - 2) if config.get("rescale_betas_zero_snr") else last


@dataclass(frozen=True)
class FlowNoise(NoiseSpec):
    """Noise along a straight line, with timesteps shifted as the scheduler's configuration defines.

    Attributes:
        training_schedule: Settings that replace the scheduler's configuration in training, because the
            published schedule may be one for drawing, with many steps at high noise levels.
    """

    process: str = "noise:FlowProcess"
    density: Density = "logit_normal"
    training_schedule: Callable[[ModelFolder], Mapping[str, Any]] = lambda model: {}

    def prediction_type(self, model: ModelFolder) -> Prediction:
        return "flow"

    def timestep_facts(self, model: ModelFolder) -> dict[str, Any]:
        schedule = {**model.config("scheduler"), **self.training_schedule(model)}
        return {name: schedule.get(name) for name in _SHIFT_KEYS}


@dataclass(frozen=True)
class SolverFlowNoise(FlowNoise):
    """Flow matching for models published with another solver's configuration, which has a `flow_shift`."""

    process: str = "noise:SolverFlowProcess"

    def timestep_facts(self, model: ModelFolder) -> dict[str, Any]:
        return {**super().timestep_facts(model), "flow_shift": model.config("scheduler").get("flow_shift")}
