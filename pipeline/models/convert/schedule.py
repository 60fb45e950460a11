"""What a single file says of its noise schedule, and the schedule's configuration that follows.

Only a table of betas leaves a choice: the denoiser predicts the noise or the velocity, which its weights do
not show. Trainers say it by tensors that are there for their names, `v_pred` and `ztsnr` (zero terminal
signal-to-noise ratio, https://arxiv.org/abs/2305.08891), or in ModelSpec's metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from pipeline.models.convert.header import Header
from pipeline.models.families import BetaPrediction

Source = Literal["the file", "--prediction", "--like"]

_KNOWN_WORDS: dict[str, BetaPrediction] = {
    "epsilon": "epsilon",
    "eps": "epsilon",
    "v": "v_prediction",
    "v_prediction": "v_prediction",
    "v-prediction": "v_prediction",
    "velocity": "v_prediction",
}
_RESCALING = ("DDIMScheduler", "DDPMScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler")
"""Schedules of diffusers whose configuration has `rescale_betas_zero_snr`."""


@dataclass(frozen=True)
class Said:
    """What a file says of its schedule; None where it says nothing."""

    prediction: BetaPrediction | None
    zero_snr: bool | None


@dataclass(frozen=True)
class Schedule:
    """A schedule's configuration, and where it is from.

    Attributes:
        config: As `scheduler_config.json`.
        prediction: What the denoiser predicts.
        zero_snr: Whether the last step is noise alone.
        source: Of `prediction`.
    """

    config: dict[str, Any]
    prediction: BetaPrediction
    zero_snr: bool
    source: Source


def said_by(header: Header) -> Said:
    """What the names and the metadata of the file say."""
    metadata = header.metadata
    word = metadata.get("modelspec.prediction_type", "").strip().lower()
    prediction = _KNOWN_WORDS.get(word)
    if "v_pred" in header.tensors or metadata.get("modelspec.architecture", "").endswith("-768-v"):
        prediction = "v_prediction"
    zero_snr = "ztsnr" in header.tensors or metadata.get("ss_zero_terminal_snr", "").lower() == "true"
    return Said(prediction, True if zero_snr else None)


def schedule_of(
    like: dict[str, Any], said: Said, *, prediction: BetaPrediction | None, zero_snr: bool | None
) -> Schedule:
    """The configuration `like` with what the file says, and before that what the user says.

    Args:
        like: `scheduler_config.json` of the model that the file is made from.
        said: By the file.
        prediction: By the user; None: not said.
        zero_snr: By the user likewise.
    """
    before = cast("BetaPrediction", like.get("prediction_type", "epsilon"))
    source: Source = "--prediction" if prediction else "the file" if said.prediction else "--like"
    chosen = prediction or said.prediction or before
    config = {**like, "prediction_type": chosen}
    rescale = said.zero_snr if zero_snr is None else zero_snr
    if rescale is None:
        rescale = bool(like.get("rescale_betas_zero_snr")) and chosen == before
    if rescale != bool(like.get("rescale_betas_zero_snr")):
        config["rescale_betas_zero_snr"] = rescale
    if rescale:
        config["timestep_spacing"] = "trailing"  # so that drawing begins at the step that is noise alone
        if config.get("_class_name") not in _RESCALING:
            config["_class_name"] = "DDIMScheduler"
    return Schedule(config, chosen, rescale, source)
