from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest

from pipeline.errors import FamilyError
from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.parts.noise import (
    FLUX_SHIFT,
    RESCALING_SCHEDULERS,
    BetaNoise,
    FlowNoise,
    SolverFlowNoise,
)

PUBLISHED: dict[str, Any] = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "use_dynamic_shifting": True,
    "time_shift_type": "exponential",
}
"""The shift of FLUX.1 dev: its scheduler/scheduler_config.json, and the default type of diffusers."""


def model_with(folder: Path, **config: Any) -> ModelFolder:
    """Return a model with this configuration of its scheduler."""
    (folder / "scheduler").mkdir()
    index = {"_class_name": "StableDiffusionPipeline", "scheduler": ["diffusers", "DDIMScheduler"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    return ModelFolder(folder)


def test_flux_shift_is_the_published_one() -> None:
    assert FLUX_SHIFT == PUBLISHED


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_the_prediction_of_a_table_of_betas_is_that_of_the_scheduler(tmp_path: Path, prediction: str) -> None:
    assert BetaNoise().prediction_type(model_with(tmp_path, prediction_type=prediction)) == prediction


def test_a_scheduler_without_a_prediction_type_predicts_the_noise(tmp_path: Path) -> None:
    model = model_with(tmp_path)
    assert BetaNoise().prediction_type(model) == "epsilon"
    assert BetaNoise().timestep_facts(model) == {}


@pytest.mark.parametrize(
    "config",
    [{"prediction_type": "sample"}, {"_class_name": "EDMEulerScheduler", "prediction_type": "epsilon"}],
)
def test_other_predictions_and_schedules_are_errors(tmp_path: Path, config: dict[str, str]) -> None:
    with pytest.raises(FamilyError):
        BetaNoise().prediction_type(model_with(tmp_path, **config))


def test_the_schedulers_that_rescale_are_those_of_diffusers_with_the_setting() -> None:
    rescaling = {
        name
        for name in dir(diffusers)
        if name.endswith("Scheduler")
        and not name.startswith("Flax")
        and "rescale_betas_zero_snr" in inspect.signature(getattr(diffusers, name)).parameters
    }
    assert rescaling == RESCALING_SCHEDULERS


def test_the_facts_of_a_flow_are_all_settings_of_its_shift_with_those_of_the_training(tmp_path: Path) -> None:
    model = model_with(tmp_path, shift=3.0, base_shift=0.4, num_train_timesteps=1000)
    missing = dict.fromkeys(["shift", *PUBLISHED])
    assert FlowNoise().timestep_facts(model) == {**missing, "shift": 3.0, "base_shift": 0.4}
    trained = FlowNoise(training_schedule=lambda _: FLUX_SHIFT).timestep_facts(model)
    assert trained == {"shift": 3.0, **PUBLISHED}
    assert FlowNoise().prediction_type(model) == "flow"


def test_the_facts_of_a_solver_contain_its_shift_of_the_flow(tmp_path: Path) -> None:
    model = model_with(tmp_path, flow_shift=2.5)
    assert SolverFlowNoise().timestep_facts(model)["flow_shift"] == 2.5
