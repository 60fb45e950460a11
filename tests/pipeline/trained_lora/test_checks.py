from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.recipe.check_specs import SPECS
from pipeline.trained_lora.export.lora_files import ADAPTER_METADATA_KEY, LAYOUTS
from tests.pipeline.trained_lora.published_run import MODULES, PublishedRun


@pytest.fixture
def result(tmp_path: Path) -> PublishedRun:
    return PublishedRun(tmp_path)


WARNINGS = {"loss_fell", "validation_loss", "modules_touched", "as_declared"}


def test_a_valid_result_passes_and_four_of_its_checks_are_warnings(result: PublishedRun) -> None:
    assert result.failed() == set()
    severities = {name: finding.severity for name, finding in result.findings().items()}
    assert severities == {name: "warn" if name in WARNINGS else "error" for name in severities}


def test_a_passing_check_reports_all_its_numbers(result: PublishedRun) -> None:
    files = [result.path(layout).name for layout in LAYOUTS]
    largest = max(0.5 * float(np.linalg.norm(up @ down)) for down, up in result.factors.values())
    expected = {
        "loss_finite": {"steps": 3},
        "adapter_not_zero": {"modules": 2, "zero_modules": 0, "largest_norm": pytest.approx(largest)},
        "reload_equals": dict.fromkeys(files, 0.0),
        "plan_completed": {"steps": 3, "asked_steps": 3},
        "shape_uniformity": {"modules": 2, "rank": 4},
        "file_size_outliers": {file: (result.lora / file).stat().st_size for file in files},
        "output_changed": {"output_change": 0.25},
        "loss_fell": {},
        "validation_loss": {},
        "modules_touched": {},
        "as_declared": {},
    }
    actual = {name: finding.numbers for name, finding in result.findings().items()}
    assert actual == {name: {"num_rows": 0, **numbers} for name, numbers in expected.items()}


def test_R05_a_nan_loss_fails_loss_finite_and_lists_its_step(result: PublishedRun) -> None:
    result.metrics[1]["loss"] = float("nan")
    result.write_metrics()
    finding = result.findings()["loss_finite"]
    assert not finding.passed
    assert finding.rows == [{"step": 1, "loss": "nan"}]


def test_a_run_without_metrics_fails_loss_finite_and_plan_completed(result: PublishedRun) -> None:
    result.metrics = []
    result.write_metrics()
    assert result.failed() == {"loss_finite", "plan_completed"}


def test_a_missing_step_fails_plan_completed(result: PublishedRun) -> None:
    del result.metrics[1]
    result.write_metrics()
    assert result.findings()["plan_completed"].rows == [{"step": 1}]
    assert result.failed() == {"plan_completed"}


def test_a_run_with_too_few_steps_fails_plan_completed(result: PublishedRun) -> None:
    result.record(steps=2)
    assert result.failed() == {"plan_completed"}


def test_R06_an_all_zero_adapter_fails_adapter_not_zero(result: PublishedRun) -> None:
    for name, (down, up) in result.factors.items():
        result.factors[name] = (down, np.zeros_like(up))
    result.write_all()
    assert result.failed() == {"adapter_not_zero", "modules_touched"}


def test_a_single_zero_module_is_a_warning_that_names_the_module(result: PublishedRun) -> None:
    down, up = result.factors["left.to_q"]
    result.factors["left.to_q"] = (down, np.zeros_like(up))
    result.write_all()
    assert result.failed() == {"modules_touched"}
    assert result.findings()["modules_touched"].rows == [{"module": "left.to_q"}]


def test_an_override_fails_as_declared_until_the_recipe_has_its_value(result: PublishedRun) -> None:
    finding = result.findings(overrides={"seed": 7})["as_declared"]
    assert not finding.passed
    assert finding.summary == "the LoRA was trained with seed 7 instead of 42"
    assert finding.rows == [{"setting": "seed", "run": 7, "recipe": 42}]

    training = result.recipe.training.model_copy(update={"seed": 7})
    result.recipe = result.recipe.model_copy(update={"training": training})
    assert result.findings(overrides={"seed": 7})["as_declared"].passed


@pytest.mark.parametrize(
    ("change", "reported"), [(0.0, 0.0), (float("nan"), None), (float("inf"), None)], ids=["0", "nan", "inf"]
)
def test_R06_an_adapter_without_a_finite_effect_on_the_output_fails_output_changed(
    result: PublishedRun, change: float, reported: float | None
) -> None:
    result.output_change = change
    result.record()
    assert result.failed() == {"output_changed"}
    assert result.findings()["output_changed"].numbers == {"num_rows": 0, "output_change": reported}


@pytest.mark.parametrize(
    ("steps", "last", "failed"),
    [
        (50, 0.95, True),
        (50, 0.9, True),
        (50, 0.899, False),
        (49, 0.95, False),
    ],
    ids=["higher", "equal", "lower", "too few steps"],
)
def test_a_loss_that_does_not_fall_is_a_warning_only_after_enough_steps(
    result: PublishedRun, steps: int, last: float, failed: bool
) -> None:
    result.trend = {"first": 0.9, "last": last, "error": 0.05}
    result.lengthen(steps)
    assert result.failed() == ({"loss_fell"} if failed else set())
    if failed:
        assert f"0.900 to {last:.3f}" in result.findings()["loss_fell"].summary


def test_a_rising_validation_loss_is_a_warning_that_names_the_best_step(result: PublishedRun) -> None:
    def failed_after(*losses: float) -> set[str]:
        result.write_validation(*losses)
        return result.failed()

    assert failed_after(0.5, 0.4, 0.402) == set()
    assert failed_after(0.5, 0.4, 1.01 * 0.4) == set(), "the limit itself is allowed"
    assert failed_after(0.5, 0.4, np.nextafter(1.01 * 0.4, 1).item()) == {"validation_loss"}
    assert failed_after(0.5, 0.4, 0.45) == {"validation_loss"}
    assert "0.4000 at step 1" in result.findings()["validation_loss"].summary
    assert failed_after(0.5, 0.4, 0.45, 0.39) == set()


def change_value(result: PublishedRun, layout: Any) -> None:
    tensors = {key: value.copy() for key, value in result.tensors(layout).items()}
    tensors[MODULES[0].keys(layout)[1]][0, 0] += 0.5
    result.write(layout, tensors)


def change_scale(result: PublishedRun, layout: Any) -> None:
    tensors = result.tensors(layout)
    alpha = MODULES[0].keys(layout)[2]
    if alpha is not None:
        tensors[alpha] = np.array(3.0, dtype=np.float32)
        result.write(layout, tensors)
    else:
        adapter = json.dumps({"unet.r": 4, "unet.lora_alpha": 3.0})
        result.write(layout, tensors, {ADAPTER_METADATA_KEY: adapter})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", [change_value, change_scale])
@pytest.mark.parametrize("recorded", [False, True])
def test_R06_a_file_with_changed_values_or_scale_fails_reload_equals(
    result: PublishedRun, layout: Any, change: Callable[[PublishedRun, Any], None], recorded: bool
) -> None:
    change(result, layout)
    if recorded:
        result.record()
    finding = result.findings()["reload_equals"]
    assert not finding.passed
    reported_files = {row["file"] for row in finding.rows}
    if recorded and layout == "diffusers" and change is change_value:
        # The other layouts are compared with the diffusers layout, so they are reported instead of it.
        assert reported_files == {result.path("kohya").name, result.path("comfyui").name}
    else:
        assert result.path(layout).name in reported_files


@pytest.mark.parametrize("save_dtype", ["float32", "float16"])
def test_R06_a_scale_may_be_in_the_factors_instead_of_alpha(tmp_path: Path, save_dtype: str) -> None:
    """Releases before 0.4.0 wrote the trained alpha into ComfyUI's file, and their runs stay valid."""
    result = PublishedRun(tmp_path, lora={"save_dtype": save_dtype})
    assert "reload_equals" not in result.failed()
    tensors = result.tensors("comfyui")
    for module in MODULES:
        down, _, alpha = module.keys("comfyui")
        tensors[down] = tensors[down] * tensors[down].dtype.type(0.5)
        tensors[str(alpha)] = np.array(4.0, dtype=np.float32)
    result.write("comfyui", tensors)
    result.record()
    assert "reload_equals" not in result.failed()

    tensors[MODULES[0].keys("comfyui")[0]] *= tensors[down].dtype.type(1.01)
    result.write("comfyui", tensors)
    result.record()
    (row,) = result.findings()["reload_equals"].rows
    assert (row["module"], row["reason"]) == (MODULES[0].name, "the scale must be 0.5, got 1.0")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_key_is_reported_by_name(result: PublishedRun, layout: Any) -> None:
    tensors = result.tensors(layout)
    missing = MODULES[1].keys(layout)[0]
    del tensors[missing]
    result.write(layout, tensors)
    result.record()
    finding = result.findings()["shape_uniformity"]
    assert [(row["file"], row["key"], row["shape"]) for row in finding.rows] == [
        (result.path(layout).name, missing, "None")
    ]
    assert "file_size_outliers" in result.failed()


def test_a_rank_that_differs_from_the_recipe_fails_the_shape_and_size_checks(result: PublishedRun) -> None:
    for name, (down, up) in result.factors.items():
        result.factors[name] = (down[:2], up[:, :2])
    result.write_all()
    assert {"shape_uniformity", "file_size_outliers"} <= result.failed()


def test_a_truncated_or_missing_file_fails_every_check(result: PublishedRun) -> None:
    path = result.path("kohya")
    path.write_bytes(path.read_bytes()[:-10])
    assert result.failed() == {spec.name for spec in SPECS["trained_lora"]}
    path.unlink()
    assert result.failed() == {spec.name for spec in SPECS["trained_lora"]}
    assert str(path) in result.findings()["reload_equals"].rows[0]["where"]


def test_a_folder_without_provenance_fails_every_check(result: PublishedRun) -> None:
    (result.lora / "provenance.json").unlink()
    assert result.failed() == {spec.name for spec in SPECS["trained_lora"]}


def test_the_fix_names_lora_only_if_its_files_changed_after_the_run(result: PublishedRun) -> None:
    run = str(result.layout.folder)
    result.factors = {name: (down[:2], up[:, :2]) for name, (down, up) in result.factors.items()}
    result.write_all()
    assert f"delete {run} and start the job again" in result.findings()["shape_uniformity"].fix
    result.write("kohya", result.tensors("kohya"), metadata={"changed": "yes"})
    for name in ("shape_uniformity", "reload_equals", "file_size_outliers"):
        assert result.findings()[name].fix.startswith("start the job again, which writes the files in lora/")

    # The log of a finished run is not written again, unless the run is trained again.
    del result.metrics[1]
    result.write_metrics()
    assert f"delete {run} and" in result.findings()["plan_completed"].fix
    result.layout.finished.write_text("{}")
    assert f"delete {result.layout.finished} and" in result.findings()["plan_completed"].fix
