"""The noise schedule of a converted model, from the user, the file or the reference model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from pipeline.models.convert.header import Header
from pipeline.models.families import BetaPrediction

Source = Literal["the file", "--prediction", "--like"]

# Values of `modelspec.prediction_type`.
_PREDICTIONS: dict[str, BetaPrediction] = {
    "epsilon": "epsilon",
    "eps": "epsilon",
    "v": "v_prediction",
    "v_prediction": "v_prediction",
    "v-prediction": "v_prediction",
    "velocity": "v_prediction",
}

# Schedulers of diffusers that support `rescale_betas_zero_snr`.
_RESCALING = ("DDIMScheduler", "DDPMScheduler", "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler")


@dataclass(frozen=True)
class RecordedSchedule:
    """Schedule recorded in a file; None for a value that is not recorded."""

    prediction: BetaPrediction | None
    zero_snr: bool | None


@dataclass(frozen=True)
class Schedule:
    """Configuration of a schedule.

    Attributes:
        config: Content of `scheduler_config.json`.
        zero_snr: True if the last timestep is pure noise.
        source: Source of `prediction`.
    """

    config: dict[str, Any]
    prediction: BetaPrediction
    zero_snr: bool
    source: Source


def recorded_schedule(header: Header) -> RecordedSchedule:
    """Return the schedule recorded in the tensor names and metadata of a file."""
    # The weights do not show whether a model predicts noise or velocity. Trainers record it in empty tensors
    # named `v_pred` and `ztsnr` (zero terminal signal-to-noise ratio, https://arxiv.org/abs/2305.08891), or
    # in ModelSpec metadata.
    metadata = header.metadata
    prediction = _PREDICTIONS.get(metadata.get("modelspec.prediction_type", "").strip().lower())
    if "v_pred" in header.tensors or metadata.get("modelspec.architecture", "").endswith("-768-v"):
        prediction = "v_prediction"
    zero_snr = "ztsnr" in header.tensors or metadata.get("ss_zero_terminal_snr", "").lower() == "true"
    return RecordedSchedule(prediction, True if zero_snr else None)


def choose_schedule(
    reference: dict[str, Any],
    recorded: RecordedSchedule,
    *,
    prediction: BetaPrediction | None,
    zero_snr: bool | None,
) -> Schedule:
    """Return the schedule of the converted model; the user has precedence over the file and the reference.

    `reference` is the reference model's `scheduler_config.json`. `prediction` and `zero_snr` are the user's
    choices, or None.
    """
    reference_prediction = cast("BetaPrediction", reference.get("prediction_type", "epsilon"))
    source: Source = "--prediction" if prediction else "the file" if recorded.prediction else "--like"
    chosen = prediction or recorded.prediction or reference_prediction
    config = {**reference, "prediction_type": chosen}

    # The zero SNR of the reference belongs to its prediction: an epsilon model cannot be trained with it.
    reference_rescales = bool(reference.get("rescale_betas_zero_snr"))
    rescale = recorded.zero_snr if zero_snr is None else zero_snr
    if rescale is None:
        rescale = reference_rescales and chosen == reference_prediction
    if rescale != reference_rescales:
        config["rescale_betas_zero_snr"] = rescale

    if rescale:
        config["timestep_spacing"] = "trailing"  # sampling must start at the timestep of pure noise
        if config.get("_class_name") not in _RESCALING:
            config["_class_name"] = "DDIMScheduler"
    return Schedule(config, chosen, rescale, source)
