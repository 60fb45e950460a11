"""Whether a base model can be trained towards what the recipe asks for, here. Torch-free: asked first."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from pipeline.errors import TrainingError
from pipeline.models.families import FAMILIES, Family
from pipeline.recipe.rules import one_of

if TYPE_CHECKING:
    from pipeline.models.families import Prediction
    from pipeline.recipe import TrainingSettings


def require_trackers(settings: TrainingSettings) -> None:
    """Refuse a tracker whose package is not there, before anything is launched.

    Raises:
        TrainingError: Says what to install.
    """
    if "wandb" in settings.trackers and find_spec("wandb") is None:
        raise TrainingError(
            "the package wandb is not installed",
            where="training.trackers",
            fix="pip install wandb, and wandb login; or remove it from trackers",
        )


def require_text_encoders(settings: TrainingSettings, family: Family) -> None:
    """Refuse to train text encoders of a family whose LoRA files have no place for them.

    Raises:
        TrainingError: Names the families that can.
    """
    if settings.lora.text_encoders is None or family.trainable_text_encoders():
        return
    can = [each.name for each in FAMILIES if each.trains_text_encoders]
    raise TrainingError(
        f"no LoRA on the text encoders of {family.name}: diffusers' loader would not take it, or it is not "
        "supported here yet",
        where="training.lora.text_encoders",
        fix=f"remove the key, or use a base model of {one_of(can)}",
    )


def require_objective(settings: TrainingSettings, prediction: Prediction) -> None:
    """Refuse what has no meaning for a model that predicts `prediction`.

    Raises:
        TrainingError: Names the first such setting.
    """
    if settings.noise.zero_terminal_snr and prediction != "v_prediction":
        raise TrainingError(
            f"zero_terminal_snr needs a v-prediction model, and this one predicts {prediction}: where no "
            "signal is left, there is nothing to learn from predicting the noise",
            where="training.noise.zero_terminal_snr",
            fix="set it to false, or use a base model with v-prediction",
        )
    if prediction != "flow":
        if settings.timesteps.shift is not None:
            raise TrainingError(
                f"timesteps.shift {settings.timesteps.shift} is for flow matching, and this model predicts "
                f"{prediction} on a table of betas",
                where="training.timesteps.shift",
                fix="set it to null; timesteps.density logit_normal with a location above 0 draws more noise",
            )
        return
    for key, value, default in (
        ("loss.weighting", settings.loss.weighting, "none"),
        ("noise.offset", settings.noise.offset, 0.0),
    ):
        if value != default:
            raise TrainingError(
                f"{key} {value} is made for noise by a table of betas, and this model is trained by flow "
                "matching",
                where=f"training.{key}",
                fix=f"set it to {default}",
            )
