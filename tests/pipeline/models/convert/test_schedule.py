"""The noise schedule comes from the user, then from the file, then from the reference model."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.models.convert.header import Header, Tensor
from pipeline.models.convert.schedule import choose_schedule, recorded_schedule

EULER = {
    "_class_name": "EulerDiscreteScheduler",
    "prediction_type": "epsilon",
    "timestep_spacing": "leading",
    "beta_schedule": "scaled_linear",
}
PNDM = {"_class_name": "PNDMScheduler", "beta_schedule": "scaled_linear"}
V768 = {"_class_name": "DDIMScheduler", "prediction_type": "v_prediction"}
ZERO = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
V = {"prediction_type": "v_prediction"}


def header(*names: str, **metadata: str) -> Header:
    return Header(Path("x.safetensors"), {name: Tensor("F32", (0,)) for name in names}, metadata)


@pytest.mark.parametrize(
    ("reference", "recorded", "choices", "expected", "source"),
    [
        (EULER, header(), (None, None), EULER, "--like"),
        (EULER, header("v_pred"), (None, None), {**EULER, **V}, "the file"),
        (EULER, header("v_pred", "ztsnr"), (None, None), {**EULER, **V, **ZERO}, "the file"),
        (EULER, header(**{"modelspec.prediction_type": "v"}), (None, None), {**EULER, **V}, "the file"),
        (EULER, header(**{"modelspec.prediction_type": "epsilon"}), (None, None), EULER, "the file"),
        (EULER, header("v_pred", "ztsnr"), ("v_prediction", False), {**EULER, **V}, "--prediction"),
        (EULER, header("v_pred"), ("epsilon", None), EULER, "--prediction"),
        (EULER, header(), ("v_prediction", True), {**EULER, **V, **ZERO}, "--prediction"),
        (V768, header(), (None, None), V768, "--like"),
        (V768, header(), ("epsilon", None), {**V768, "prediction_type": "epsilon"}, "--prediction"),
        (PNDM, header(), (None, None), {**PNDM, "prediction_type": "epsilon"}, "--like"),
        (
            PNDM,
            header("v_pred", ss_zero_terminal_snr="True"),
            (None, None),
            {**PNDM, **V, **ZERO, "_class_name": "DDIMScheduler"},
            "the file",
        ),
    ],
)
def test_the_configuration_follows_the_user_then_the_file_then_the_reference(
    reference, recorded, choices, expected, source
) -> None:
    prediction, zero_snr = choices
    schedule = choose_schedule(
        reference, recorded_schedule(recorded), prediction=prediction, zero_snr=zero_snr
    )
    assert schedule.config == expected
    assert schedule.prediction == expected.get("prediction_type")
    assert schedule.zero_snr is bool(expected.get("rescale_betas_zero_snr"))
    assert schedule.source == source


def test_an_epsilon_model_does_not_inherit_zero_snr() -> None:
    reference = {**EULER, **V, **ZERO}
    assert (
        choose_schedule(reference, recorded_schedule(header()), prediction=None, zero_snr=None).config
        == reference
    )
    schedule = choose_schedule(reference, recorded_schedule(header()), prediction="epsilon", zero_snr=None)
    assert (schedule.prediction, schedule.zero_snr) == ("epsilon", False)
