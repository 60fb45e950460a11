"""The sections `training.loss`, `training.timesteps` and `training.noise`: the training objective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from pipeline.recipe.settings import Settings, Violation


class LossSettings(Settings):
    """Loss between the denoiser's prediction and its target, and the weight of each noise level."""

    requirements = (
        ("delta", "kind", "huber", "smooth_l1"),
        ("gamma", "weighting", "min_snr", "soft_min_snr"),
    )

    kind: Literal["mse", "huber", "smooth_l1"] = Field(
        default="mse",
        description="mse: squared error. huber and smooth_l1: squared below `delta` and linear above, which "
        "reduces the influence of outliers.",
    )
    delta: float = Field(
        default=0.1,
        gt=0.0,
        description="Error at which huber and smooth_l1 change from squared to linear.",
    )
    weighting: Literal["none", "min_snr", "soft_min_snr", "debiased"] = Field(
        default="none",
        description="Weight of a noise level, computed from its signal-to-noise ratio. min_snr and "
        "soft_min_snr reduce the weight of levels with little noise; debiased increases the weight of noisy "
        "levels. Not available for flow matching.",
    )
    gamma: float = Field(
        default=5.0,
        gt=0.0,
        description="Signal-to-noise ratio at which min_snr and soft_min_snr limit the weight.",
    )
    prior: Literal["images", "prediction"] = Field(
        default="images",
        description="Target of datasets with `role: prior`. images: the usual one, from their pixels, as in "
        "DreamBooth. prediction: the base model's prediction without the LoRA for the same noisy latent, so "
        "that training keeps what the base model draws for these captions. A batch with such an image takes "
        "one more forward pass.",
    )
    prior_weight: float = Field(
        default=1.0,
        gt=0.0,
        description="Factor of the loss of images from datasets with `role: prior`, times their "
        "`datasets[].loss_weight`.",
    )


class TimestepSettings(Settings):
    """Distribution of noise levels in training, from 0 (no noise) to 1 (noise only)."""

    requirements = (
        ("location", "density", "logit_normal"),
        ("scale", "density", "logit_normal"),
        ("mode_scale", "density", "mode"),
    )

    density: Literal["auto", "uniform", "logit_normal", "mode"] = Field(
        default="auto",
        description="auto: the default of the base model's family, see docs/families.md. uniform: all levels "
        "are equally likely. logit_normal: centred at `location` with width `scale`. mode: favours the "
        "middle, by `mode_scale`.",
    )
    location: float = Field(
        default=0.0, description="Centre of logit_normal; 0 is the middle, larger values are noisier."
    )
    scale: float = Field(default=1.0, gt=0.0, description="Width of logit_normal.")
    mode_scale: float = Field(
        default=1.29,  # the value of the Stable Diffusion 3 paper, https://arxiv.org/abs/2403.03206
        ge=-1.0,
        le=1.75,
        description="Strength of mode; 0 is uniform, larger values are steeper.",
    )
    min: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Lowest noise level. For flow matching, it applies before the shift; see `max`.",
    )
    max: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="Highest noise level. For flow matching, it applies before the shift: with 0.5, Stable "
        "Diffusion 3 and its shift of 3 train on levels up to 0.75.",
    )
    shift: float | None = Field(
        default=None,
        gt=0.0,
        description="Shift of noise levels for flow matching; values above 1 shift towards more noise. null "
        "uses the shift of the base model's family, see docs/families.md; for some it depends on the image "
        "size. Not available for Ideogram 4.",
    )

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        if self.min >= self.max:
            what = f"timesteps.min must be less than max ({self.max}), got {self.min}"
            yield Violation("min", what, "swap them, or remove one", involves=("min", "max"))


class NoiseSettings(Settings):
    """Changes to the Gaussian noise that is added to a latent."""

    offset: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Strength of offset noise, which is constant over each channel, such as 0.05. It lets "
        "the model learn darker and brighter images. Not available for flow matching.",
    )
    input_perturbation: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Strength of additional noise in the denoiser's input that is not part of the target, "
        "such as 0.1. It makes sampling less sensitive to accumulated errors.",
    )
    zero_terminal_snr: bool = Field(
        default=False,
        description="Rescale the noise schedule so that its last step contains no signal. For models that "
        "predict v only. Previews and pictures of `latentline sample` are drawn on the same schedule, with "
        "DDIM, and the model card shows how to draw on it in diffusers.",
    )
