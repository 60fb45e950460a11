"""Checks that a base model supports the recipe's training settings, made before anything is launched."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from pipeline.errors import TrainingError
from pipeline.models.families import FAMILIES, Family
from pipeline.recipe.settings import one_of

if TYPE_CHECKING:
    from pipeline.models.families import Prediction
    from pipeline.recipe import TrainingSettings


def require_trackers(settings: TrainingSettings) -> None:
    """Raise TrainingError if the package of a tracker is not installed."""
    if "wandb" in settings.trackers and find_spec("wandb") is None:
        raise TrainingError(
            "the package wandb is not installed",
            where="training.trackers",
            fix="run pip install wandb and wandb login, or remove wandb from trackers",
        )


def require_text_encoders(settings: TrainingSettings, family: Family) -> None:
    """Raise TrainingError if the recipe trains text encoders that the family cannot train."""
    if settings.lora.text_encoders is None or family.trainable_text_encoders():
        return
    supported = [each.name for each in FAMILIES if each.trains_text_encoders]
    raise TrainingError(
        f"a LoRA on the text encoders of {family.name} is not supported, either by diffusers' loader or by "
        "Latentline",
        where="training.lora.text_encoders",
        fix=f"remove the key, or use a base model of {one_of(supported)}",
    )


def require_objective(settings: TrainingSettings, prediction: Prediction) -> None:
    """Raise TrainingError on the first setting that has no meaning for a model that predicts `prediction`."""
    if settings.noise.zero_terminal_snr and prediction != "v_prediction":
        raise TrainingError(
            f"zero_terminal_snr requires a v-prediction model, but this model predicts {prediction}: at zero "
            "signal, predicting the noise teaches nothing",
            where="training.noise.zero_terminal_snr",
            fix="set it to false, or use a base model with v-prediction",
        )

    if prediction != "flow":
        if settings.timesteps.shift is not None:
            raise TrainingError(
                f"timesteps.shift {settings.timesteps.shift} requires a flow-matching model, but this model "
                f"predicts {prediction} on a beta schedule",
                where="training.timesteps.shift",
                fix="set it to null; for more noise use timesteps.density logit_normal, location above 0",
            )
        return

    beta_schedule_only = (
        ("loss.weighting", settings.loss.weighting, "none"),
        ("noise.offset", settings.noise.offset, 0.0),
    )
    for key, value, default in beta_schedule_only:
        if value != default:
            raise TrainingError(
                f"{key} {value} requires a model with a beta schedule, but this model uses flow matching",
                where=f"training.{key}",
                fix=f"set it to {default}",
            )
