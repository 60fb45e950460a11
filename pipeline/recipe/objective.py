"""What training minimises: the loss, its weighting, the noise, and which timesteps are drawn."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pipeline.recipe.rules import Broken, raise_broken
from pipeline.recipe.section import Settings

DEFAULT_DELTA = 0.1
DEFAULT_GAMMA = 5.0


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
