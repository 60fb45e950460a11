"""The checks of runs with other adapters, settings and records than those of `test_checks.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.recipe.check_specs import SPECS
from pipeline.trained_lora.export.lora_files import LAYOUTS, LoraModule
from tests.pipeline.trained_lora.published_run import MODULES, PublishedRun

EVERY_CHECK = {spec.name for spec in SPECS["trained_lora"]}


def set_loss(run: PublishedRun, loss: float) -> None:
    run.metrics[1]["loss"] = loss
    run.write_metrics()


def drop_step(run: PublishedRun) -> None:
    del run.metrics[1]
    run.write_metrics()


def clear_adapter(run: PublishedRun) -> None:
    run.factors = {name: (down, np.zeros_like(up)) for name, (down, up) in run.factors.items()}
    run.write_all()


def change_file(run: PublishedRun) -> None:
    tensors = run.tensors("kohya")
    run.write("kohya", {key: np.array(value + 0.5, value.dtype) for key, value in tensors.items()})


def halve_rank(run: PublishedRun) -> None:
    run.factors = {name: (down[:2], up[:, :2]) for name, (down, up) in run.factors.items()}
    run.write_all()


def set_output_change(run: PublishedRun) -> None:
    run.output_change = 0.0
    run.record(steps=50)


def set_trend(run: PublishedRun) -> None:
    run.trend = {"first": 0.9, "last": 1.0, "error": 0.05}
    run.record(steps=50)


FAILURES: dict[str, tuple[Callable[[PublishedRun], None], set[str]]] = {
    "loss_finite": (lambda run: set_loss(run, float("inf")), {"step", "loss"}),
    "plan_completed": (drop_step, {"step"}),
    "adapter_not_zero": (clear_adapter, {"module"}),
    "modules_touched": (clear_adapter, {"module"}),
    "reload_equals": (change_file, {"file", "module", "reason"}),
    "shape_uniformity": (halve_rank, {"file", "key", "shape", "asked"}),
    "file_size_outliers": (halve_rank, {"file", "bytes", "expected_bytes"}),
    "output_changed": (set_output_change, set()),
    "loss_fell": (set_trend, set()),
    "validation_loss": (lambda run: run.write_validation(0.5, 0.4, 0.45), set()),
}
"""For each check, how it fails, and the columns of its rows."""


@pytest.fixture
def long_run(tmp_path: Path) -> PublishedRun:
    """A sound run with enough steps and losses for all checks."""
    run = PublishedRun(tmp_path)
    run.lengthen(50)
    run.write_validation(0.5, 0.4, 0.402)
    return run


@pytest.mark.parametrize("name", FAILURES)
def test_a_check_reports_its_numbers_and_rows_when_it_fails_and_its_numbers_when_it_passes(
    long_run: PublishedRun, name: str
) -> None:
    passed = long_run.findings()[name]
    assert passed.passed
    assert passed.rows == []
    fail, columns = FAILURES[name]
    fail(long_run)
    failed = long_run.findings()[name]
    assert not failed.passed
    if name != "shape_uniformity":  # its number is a rank, and a failed check found several
        assert failed.numbers.keys() == passed.numbers.keys()
    assert failed.numbers["num_rows"] == len(failed.rows)
    assert {key for row in failed.rows for key in row} == columns
    assert all(row.keys() == columns for row in failed.rows)
    assert failed.fix


def test_the_losses_of_a_run_are_numbers_of_its_checks(long_run: PublishedRun) -> None:
    findings = long_run.findings()
    assert findings["loss_fell"].numbers == {"num_rows": 0, "first": 1.1, "last": 0.9, "error": 0.05}
    losses = {"first": 0.5, "least": 0.4, "last": 0.402, "least_at_step": 1}
    assert findings["validation_loss"].numbers == {"num_rows": 0, **losses}


def test_the_rows_of_a_failed_check_state_what_was_found_and_expected(long_run: PublishedRun) -> None:
    halve_rank(long_run)
    findings = long_run.findings()
    key = MODULES[0].keys("kohya")[0]
    rows = [row for row in findings["shape_uniformity"].rows if row["key"] == key]
    assert rows == [
        {"file": long_run.path("kohya").name, "key": key, "shape": "(2, 6)", "asked": "(4, 6)"},
    ]
    # Each of the two modules lacks two rows of 6 and two columns of 5 values, of 4 bytes.
    by_file = {
        row["file"]: row["expected_bytes"] - row["bytes"] for row in findings["file_size_outliers"].rows
    }
    assert by_file == {long_run.path(layout).name: 2 * 2 * (6 + 5) * 4 for layout in LAYOUTS}


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e18, 1e30])
def test_a_module_whose_weights_are_not_finite_fails_and_is_listed(
    long_run: PublishedRun, value: float
) -> None:
    """The norm of the product of two finite matrices may be infinite."""
    down, up = long_run.factors["right.to_q"]
    down = np.full_like(down, value) if np.isfinite(value) else down
    long_run.factors["right.to_q"] = (down, np.full_like(up, value))
    long_run.write_all()
    finding = long_run.findings()["adapter_not_zero"]
    assert not finding.passed
    assert finding.rows == [{"module": "right.to_q"}]
    assert math.isfinite(finding.numbers["largest_norm"])


def test_the_validation_after_the_last_step_counts_and_later_ones_do_not(
    tmp_path: Path,
) -> None:
    run = PublishedRun(tmp_path)
    run.write_validation(0.5, 0.4, 0.3, 0.2, 0.1)
    losses = {"first": 0.5, "least": 0.2, "last": 0.2, "least_at_step": 3}
    assert run.findings()["validation_loss"].numbers == {"num_rows": 0, **losses}, "the run has 3 steps"


@pytest.mark.parametrize("key", ["alpha", "magnitude"])
def test_a_file_without_the_scale_or_the_magnitudes_of_a_module_differs(rich: PublishedRun, key: str) -> None:
    tensors = rich.tensors("kohya")
    missing = str(RICH[1].keys("kohya")[2]) if key == "alpha" else RICH[1].magnitude_key("kohya")
    del tensors[missing]
    rich.write("kohya", tensors)
    rich.record()
    (row,) = rich.findings()["reload_equals"].rows
    assert (row["file"], row["module"]) == (rich.path("kohya").name, RICH[1].name)
    assert missing in row["reason"]


def test_all_modules_are_listed_if_all_are_zero(long_run: PublishedRun) -> None:
    clear_adapter(long_run)
    rows = [{"module": module.name} for module in MODULES]
    findings = long_run.findings()
    assert findings["adapter_not_zero"].rows == findings["modules_touched"].rows == rows


def test_a_run_without_modules_fails(tmp_path: Path) -> None:
    run = PublishedRun(tmp_path, modules=[])
    assert run.failed() == {"adapter_not_zero", "shape_uniformity"}
    numbers = {"num_rows": 0, "modules": 0, "zero_modules": 0, "largest_norm": 0.0}
    assert run.findings()["adapter_not_zero"].numbers == numbers


@pytest.mark.parametrize("matrix", [0, 1], ids=["down", "up"])
def test_a_module_without_one_of_its_matrices_does_not_hide_the_others(
    long_run: PublishedRun, matrix: int
) -> None:
    tensors = long_run.tensors("diffusers")
    del tensors[MODULES[0].keys("diffusers")[matrix]]
    long_run.write("diffusers", tensors)
    findings = long_run.findings()
    assert findings["adapter_not_zero"].numbers["modules"] == 1
    missing = [row for row in findings["reload_equals"].rows if row["module"]]
    assert {row["module"] for row in missing} == {MODULES[0].name}


RICH_SETTINGS = {"conv_rank": 2, "conv_alpha": 1.1, "dora": True, "save_dtype": "float16"}
RICH = [
    replace(MODULES[0], magnitude=True),
    replace(MODULES[1], magnitude=True, rank=2, alpha=1.1, kernel=(3, 3)),
]
"""A linear layer and a convolution, both with DoRA's magnitudes."""


@pytest.fixture
def rich(tmp_path: Path) -> PublishedRun:
    return PublishedRun(tmp_path, lora=RICH_SETTINGS, modules=RICH)


def test_half_precision_convolutions_and_magnitudes_pass_with_the_highest_rank(rich: PublishedRun) -> None:
    assert rich.failed() == set()
    assert rich.findings()["shape_uniformity"].numbers["rank"] == 4
    (down, up), scale = rich.factors["right.to_q"], 1.1 / 2
    conv = scale * np.linalg.norm(up.reshape(5, 2).astype("f4") @ down.reshape(2, 54).astype("f4"))
    linear = 0.5 * np.linalg.norm(
        np.matmul(*(each.astype("f4") for each in reversed(rich.factors["left.to_q"])))
    )
    largest = rich.findings()["adapter_not_zero"].numbers["largest_norm"]
    assert largest == pytest.approx(float(max(conv, linear)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("value", "differs"),
    [(3.0, {"diffusers": True, "kohya": True, "comfyui": False}), (np.nan, dict.fromkeys(LAYOUTS, True))],
)
def test_other_magnitudes_are_reported_except_those_that_are_relative_to_the_base_model(
    rich: PublishedRun, layout: Any, value: float, differs: dict[str, bool]
) -> None:
    tensors = rich.tensors(layout)
    key = RICH[1].magnitude_key(layout)
    tensors[key] = np.full_like(tensors[key], value)
    rich.write(layout, tensors)
    rich.record()
    finding = rich.findings()["reload_equals"]
    assert finding.passed != differs[layout]
    assert {row["module"] for row in finding.rows} == ({RICH[1].name} if differs[layout] else set())


def test_a_smaller_rank_than_the_recipe_requests_fails_even_if_record_and_files_agree(tmp_path: Path) -> None:
    run = PublishedRun(tmp_path, modules=[replace(module, rank=2, alpha=1.0) for module in MODULES])
    assert run.failed() == {"shape_uniformity", "file_size_outliers"}
    assert run.findings(overrides={"rank": 8})["shape_uniformity"].rows[0]["asked"] == "(8, 6)"


def test_the_settings_that_override_the_recipe_for_a_run_are_those_that_it_is_compared_with(
    tmp_path: Path,
) -> None:
    run = PublishedRun(tmp_path, modules=[replace(module, rank=2, alpha=2.0) for module in MODULES])
    assert run.failed() > {"shape_uniformity"}
    findings = run.findings(overrides={"rank": 2}).values()
    assert {finding.name for finding in findings if not finding.passed} == {"as_declared"}


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e4])
@pytest.mark.parametrize(("change", "failed"), [(0.0, True), (1e-3, False)])
def test_an_adapter_that_starts_from_base_weights_is_zero_if_its_halves_cancel(
    tmp_path: Path, scale: float, change: float, *, failed: bool
) -> None:
    modules = [replace(module, rank=8, alpha=4.0) for module in MODULES]
    run = PublishedRun(tmp_path, lora={"init": "pissa"}, modules=modules)
    for name, (down, up) in run.factors.items():
        half_down, half_up = scale * down[:4], scale * up[:, :4]
        run.factors[name] = (
            np.concatenate([half_down, half_down]),
            np.concatenate([half_up, -half_up * np.float32(1 + change)], 1),
        )
    run.write_all()
    assert run.failed() == ({"adapter_not_zero", "modules_touched"} if failed else set())


def test_the_files_of_an_earlier_step_are_compared_with_the_record_of_that_step(tmp_path: Path) -> None:
    run = PublishedRun(tmp_path)
    hashes = {item["name"]: item["sha256"] for item in json.loads(run.layout.finished.read_text())["files"]}
    (run.lora / "provenance.json").write_text(json.dumps({"run": "abc", "step": 2}))
    assert run.failed() == EVERY_CHECK, "the step has no record"

    record = run.layout.checkpoints / "step-00000002" / "lora.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"sha256": hashes}))
    assert run.failed() == set()
    record.write_text(json.dumps({"sha256": {**hashes, run.path("kohya").name: "0" * 64}}))
    (row,) = run.findings()["reload_equals"].rows
    assert row["file"] == run.path("kohya").name


@pytest.mark.parametrize(
    ("finished_epochs", "failed"), [(2, set()), (1, {"plan_completed"}), (None, {"plan_completed"})]
)
def test_a_recipe_that_counts_epochs_requests_the_steps_of_a_run_of_as_many_epochs(
    tmp_path: Path, finished_epochs: int | None, failed: set[str]
) -> None:
    run = PublishedRun(tmp_path)
    training = run.recipe.training.model_copy(update={"epochs": 2, "steps": 1000})
    run.recipe = run.recipe.model_copy(update={"training": training})
    finished = json.loads(run.layout.finished.read_text())
    run.layout.finished.write_text(json.dumps({**finished, "epochs": finished_epochs}))
    assert run.failed() == failed


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a missing key": lambda record: {key: value for key, value in record.items() if key != "output_change"},
    "another type": lambda record: {**record, "modules": [{"unknown": 1}]},
    "not a number": lambda record: {**record, "output_change": "high"},
    "not an object": lambda record: [record],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_fails_every_check_and_is_named(tmp_path: Path, damage: str) -> None:
    run = PublishedRun(tmp_path)
    record = json.loads(run.layout.finished.read_text())
    run.layout.finished.write_text(json.dumps(DAMAGES[damage](record)))
    for finding in run.findings().values():
        assert not finding.passed
        assert finding.rows == [{"where": str(run.layout.finished)}]


@pytest.mark.parametrize("text", ["", "{", "[]", "1"])
def test_a_provenance_record_that_names_no_run_fails_every_check(tmp_path: Path, text: str) -> None:
    run = PublishedRun(tmp_path)
    (run.lora / "provenance.json").write_text(text)
    assert run.failed() == EVERY_CHECK


def test_a_scale_of_a_linear_layer_is_compared_in_float32(tmp_path: Path) -> None:
    """1.1 is not exact in float32, in which kohya's layout stores it."""
    modules: list[LoraModule] = [replace(module, alpha=1.1) for module in MODULES]
    assert PublishedRun(tmp_path, lora={"alpha": 1.1}, modules=modules).failed() == set()
