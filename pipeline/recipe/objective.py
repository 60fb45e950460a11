"""What training minimises: the loss, its weighting, the noise, and which timesteps are drawn."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pipeline.recipe.rules import Broken, raise_broken
from pipeline.recipe.section import Settings

DEFAULT_DELTA = 0.1
DEFAULT_GAMMA = 5.0
DEFAULT_MODE_SCALE = 1.29
"""That of the paper on Stable Diffusion 3, https://arxiv.org/abs/2403.03206."""


class LossSettings(Settings):
    """How far the denoiser's answer is from what it should be, and how much each noise level counts."""

    kind: Literal["mse", "huber", "smooth_l1"] = Field(
        default="mse",
        description="mse: squared error. huber and smooth_l1: squared below delta and linear above, so that "
        "odd samples pull less.",
    )
    delta: float = Field(
        default=DEFAULT_DELTA, gt=0.0, description="Where huber and smooth_l1 turn from squared to linear."
    )
    weighting: Literal["none", "min_snr", "soft_min_snr", "debiased"] = Field(
        default="none",
        description="Of noise levels, by their ratio of signal to noise: min_snr and soft_min_snr keep easy, "
        "hardly noisy ones from dominating; debiased weighs noisy ones more. Not for flow matching.",
    )
    gamma: float = Field(default=DEFAULT_GAMMA, gt=0.0, description="The bound of min_snr and soft_min_snr.")

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> LossSettings:
        broken: list[Broken] = []
        if self.delta != DEFAULT_DELTA and self.kind == "mse":
            fix = "set kind: huber or smooth_l1, or remove delta"
            broken.append(Broken("delta", f"delta {self.delta} has no effect with kind: mse", fix))
        if self.gamma != DEFAULT_GAMMA and self.weighting not in ("min_snr", "soft_min_snr"):
            fix = "set weighting: min_snr or soft_min_snr, or remove gamma"
            what = f"gamma {self.gamma} has no effect with weighting: {self.weighting}"
            broken.append(Broken("gamma", what, fix))
        if broken:
            raise_broken(broken, involves=("kind", "delta", "weighting", "gamma"))
        return self


class TimestepSettings(Settings):
    """Which noise levels are drawn; a level runs from 0, no noise, to 1, noise alone."""

    density: Literal["auto", "uniform", "logit_normal", "mode"] = Field(
        default="auto",
        description="auto: the base model's own. uniform: each level alike. logit_normal: around `location`, "
        "`scale` wide. mode: more of the middle, by `mode_scale`.",
    )
    location: float = Field(default=0.0, description="Of logit_normal: 0 is the middle, more is noisier.")
    scale: float = Field(default=1.0, gt=0.0, description="Of logit_normal: wider for more.")
    mode_scale: float = Field(
        default=DEFAULT_MODE_SCALE, ge=-1.0, le=1.75, description="Of mode: 0 is uniform, more is steeper."
    )
    min: float = Field(default=0.0, ge=0.0, lt=1.0, description="The least noise that is drawn.")
    max: float = Field(default=1.0, gt=0.0, le=1.0, description="The most noise that is drawn.")
    shift: float | None = Field(
        default=None,
        gt=0.0,
        description="Of flow matching: above 1 moves all levels towards noise. null: as the base model's "
        "schedule says, which for some depends on the image's size.",
    )

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> TimestepSettings:
        broken: list[Broken] = []
        if self.min >= self.max:
            what = f"min {self.min} is not below max {self.max}"
            broken.append(Broken("min", what, "swap them, or remove one"))
        for key, default, owner in (
            ("location", 0.0, "logit_normal"),
            ("scale", 1.0, "logit_normal"),
            ("mode_scale", DEFAULT_MODE_SCALE, "mode"),
        ):
            value = getattr(self, key)
            if value != default and self.density != owner:
                what = f"{key} {value} has no effect with density: {self.density}"
                broken.append(Broken(key, what, f"set density: {owner}, or remove {key}"))
        if broken:
            raise_broken(broken, involves=("density", "location", "scale", "mode_scale", "min", "max"))
        return self


class NoiseSettings(Settings):
    """What is mixed into a latent beside plain noise."""

    offset: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Strength of noise that is constant over a channel, such as 0.05: darker darks and "
        "lighter lights. Not for flow matching.",
    )
    input_perturbation: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Strength of more noise in the denoiser's input that it is not asked for, such as 0.1: "
        "against errors that add up while a picture is drawn.",
    )
    zero_terminal_snr: bool = Field(
        default=False,
        description="The noise schedule is rescaled so that its last step holds no signal; for v-prediction "
        "models only.",
    )
