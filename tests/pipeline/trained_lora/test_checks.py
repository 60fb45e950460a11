from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.checks.findings import CheckContext, Finding
from pipeline.recipe import recipe_from_mapping
from pipeline.recipe.gates import SPECS
from pipeline.storage.tables import Tables
from pipeline.trained_lora import checks as trained_lora
from pipeline.trained_lora.checks import MIN_STEPS, RISE
from pipeline.trained_lora.export.lora_files import ADAPTER_METADATA_KEY, LAYOUTS, LoraModule, layout_file
from pipeline.trained_lora.run_folder import RunLayout, run_folder

MODULES = [
    LoraModule(
        name=f"{name}.to_q",
        diffusers=f"unet.{name}.to_q",
        kohya=f"lora_unet_{name}_to_q",
        comfyui=f"diffusion_model.{name}.to_q",
        in_features=6,
        out_features=5,
        rank=4,
        alpha=2.0,
    )
    for name in ("left", "right")
]
METADATA = {ADAPTER_METADATA_KEY: json.dumps({"unet.r": 4, "unet.lora_alpha": 2.0})}

Tensors = dict[str, np.ndarray[Any, Any]]


class Result:
    """A finished run of 3 steps with its published files, written without training."""

    def __init__(self, folder: Path) -> None:
        values = {
            "datasets": [{"name": "photos", "path": folder / "photos"}],
            "cache_dir": folder / "cache",
            "output_dir": folder / "output",
            "model": {"base": "models/tiny"},
            "training": {"steps": 3, "lora": {"rank": 4, "alpha": 2.0}},
        }
        self.recipe = recipe_from_mapping("demo", values)
        self.lora = self.recipe.output_dir / "lora"
        self.layout = RunLayout(run_folder(self.recipe.output_dir, "abc"))
        self.lora.mkdir(parents=True)
        self.layout.metrics.parent.mkdir(parents=True)
        self.output_change = 0.25
        self.trend: dict[str, float] | None = {"first": 1.1, "last": 0.9, "error": 0.05}
        self.metrics = [{"step": step, "loss": 0.5} for step in range(3)]
        rng = np.random.default_rng(1)
        self.factors = {
            module.name: (
                rng.standard_normal((4, 6)).astype(np.float32),
                rng.standard_normal((5, 4)).astype(np.float32),
            )
            for module in MODULES
        }
        for layout in LAYOUTS:
            self.write(layout, self.tensors(layout))
        self.record()

    def tensors(self, layout: Any) -> Tensors:
        tensors: Tensors = {}
        for module in MODULES:
            down, up, alpha = module.keys(layout)
            tensors[down], tensors[up] = self.factors[module.name]
            if alpha is not None:
                tensors[alpha] = np.array(module.alpha, dtype=np.float32)
        return tensors

    def path(self, layout: Any) -> Path:
        return self.lora / layout_file(layout, "demo")

    def write(self, layout: Any, tensors: Tensors, metadata: dict[str, str] = METADATA) -> None:
        save_file(tensors, self.path(layout), metadata=metadata)

    def record(self, steps: int = 3) -> None:
        """Record the current files in finished.json, as the launching process does."""
        files = [
            {
                "name": self.path(layout).name,
                "max_error": 0.0,
                "sha256": hashlib.sha256(self.path(layout).read_bytes()).hexdigest(),
            }
            for layout in LAYOUTS
        ]
        finished = {"steps": steps, "modules": [asdict(module) for module in MODULES], "files": files}
        finished |= {"output_change": self.output_change, "loss_trend": self.trend}
        self.layout.finished.write_text(json.dumps(finished))
        (self.lora / "provenance.json").write_text(json.dumps({"run": "abc"}))
        self.write_metrics()

    def write_metrics(self) -> None:
        self.layout.metrics.write_text("".join(json.dumps(line) + "\n" for line in self.metrics))

    def findings(self) -> dict[str, Finding]:
        findings = trained_lora.run(CheckContext(self.recipe, Tables(self.recipe.output_dir)))
        assert [finding.name for finding in findings] == [spec.name for spec in SPECS["trained_lora"]]
        return {finding.name: finding for finding in findings}

    def failed(self) -> set[str]:
        return {name for name, finding in self.findings().items() if not finding.passed}


@pytest.fixture
def result(tmp_path: Path) -> Result:
    return Result(tmp_path)


WARNINGS = {"loss_fell", "validation_loss", "modules_touched"}


def test_a_valid_result_passes_and_three_of_its_checks_are_warnings(result: Result) -> None:
    assert result.failed() == set()
    severities = {name: finding.severity for name, finding in result.findings().items()}
    assert severities == {name: "warn" if name in WARNINGS else "error" for name in severities}


def test_a_passing_check_reports_all_its_numbers(result: Result) -> None:
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
    }
    actual = {name: finding.numbers for name, finding in result.findings().items()}
    assert actual == {name: {"num_rows": 0, **numbers} for name, numbers in expected.items()}


def test_R05_a_nan_loss_fails_loss_finite_and_lists_its_step(result: Result) -> None:
    result.metrics[1]["loss"] = float("nan")
    result.write_metrics()
    finding = result.findings()["loss_finite"]
    assert not finding.passed
    assert finding.rows == [{"step": 1, "loss": "nan"}]


def test_a_run_without_metrics_fails_loss_finite_and_plan_completed(result: Result) -> None:
    result.metrics = []
    result.write_metrics()
    assert result.failed() == {"loss_finite", "plan_completed"}


def test_a_missing_step_fails_plan_completed(result: Result) -> None:
    del result.metrics[1]
    result.write_metrics()
    assert result.findings()["plan_completed"].rows == [{"step": 1}]
    assert result.failed() == {"plan_completed"}


def test_a_run_with_too_few_steps_fails_plan_completed(result: Result) -> None:
    result.record(steps=2)
    assert result.failed() == {"plan_completed"}


def test_R06_an_all_zero_adapter_fails_adapter_not_zero(result: Result) -> None:
    for name, (down, up) in result.factors.items():
        result.factors[name] = (down, np.zeros_like(up))
    for layout in LAYOUTS:
        result.write(layout, result.tensors(layout))
    result.record()
    assert result.failed() == {"adapter_not_zero", "modules_touched"}


def test_a_single_zero_module_is_a_warning_that_names_the_module(result: Result) -> None:
    down, up = result.factors["left.to_q"]
    result.factors["left.to_q"] = (down, np.zeros_like(up))
    for layout in LAYOUTS:
        result.write(layout, result.tensors(layout))
    result.record()
    assert result.failed() == {"modules_touched"}
    assert result.findings()["modules_touched"].rows == [{"module": "left.to_q"}]


@pytest.mark.parametrize(
    ("change", "reported"), [(0.0, 0.0), (float("nan"), None), (float("inf"), None)], ids=["0", "nan", "inf"]
)
def test_R06_an_adapter_without_a_finite_effect_on_the_output_fails_output_changed(
    result: Result, change: float, reported: float | None
) -> None:
    result.output_change = change
    result.record()
    assert result.failed() == {"output_changed"}
    assert result.findings()["output_changed"].numbers == {"num_rows": 0, "output_change": reported}


@pytest.mark.parametrize(
    ("steps", "last", "failed"),
    [
        (MIN_STEPS, 0.95, True),
        (MIN_STEPS, 0.9, True),
        (MIN_STEPS, 0.899, False),
        (MIN_STEPS - 1, 0.95, False),
    ],
    ids=["higher", "equal", "lower", "too few steps"],
)
def test_a_loss_that_does_not_fall_is_a_warning_only_after_enough_steps(
    result: Result, steps: int, last: float, failed: bool
) -> None:
    result.trend = {"first": 0.9, "last": last, "error": 0.05}
    values = result.recipe.training.model_copy(update={"steps": steps})
    result.recipe = result.recipe.model_copy(update={"training": values})
    result.metrics = [{"step": step, "loss": 0.5} for step in range(steps)]
    result.record(steps=steps)
    assert result.failed() == ({"loss_fell"} if failed else set())
    if failed:
        assert f"0.900 to {last:.3f}" in result.findings()["loss_fell"].summary


def test_a_rising_validation_loss_is_a_warning_that_names_the_best_step(result: Result) -> None:
    def failed_after(*losses: float) -> set[str]:
        lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses)]
        result.layout.validation.write_text("".join(lines))
        return result.failed()

    assert failed_after(0.5, 0.4, 0.402) == set()
    assert failed_after(0.5, 0.4, RISE * 0.4) == set(), "the limit itself is allowed"
    assert failed_after(0.5, 0.4, np.nextafter(RISE * 0.4, 1).item()) == {"validation_loss"}
    assert failed_after(0.5, 0.4, 0.45) == {"validation_loss"}
    assert "0.4000 at step 1" in result.findings()["validation_loss"].summary
    assert failed_after(0.5, 0.4, 0.45, 0.39) == set()


def change_value(result: Result, layout: Any) -> None:
    tensors = {key: value.copy() for key, value in result.tensors(layout).items()}
    tensors[MODULES[0].keys(layout)[1]][0, 0] += 0.5
    result.write(layout, tensors)


def change_scale(result: Result, layout: Any) -> None:
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
    result: Result, layout: Any, change: Callable[[Result, Any], None], recorded: bool
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_key_is_reported_by_name(result: Result, layout: Any) -> None:
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


def test_a_rank_that_differs_from_the_recipe_fails_the_shape_and_size_checks(result: Result) -> None:
    for name, (down, up) in result.factors.items():
        result.factors[name] = (down[:2], up[:, :2])
    for layout in LAYOUTS:
        result.write(layout, result.tensors(layout))
    result.record()
    assert {"shape_uniformity", "file_size_outliers"} <= result.failed()


def test_a_truncated_or_missing_file_fails_every_check(result: Result) -> None:
    path = result.path("kohya")
    path.write_bytes(path.read_bytes()[:-10])
    assert result.failed() == {spec.name for spec in SPECS["trained_lora"]}
    path.unlink()
    assert result.failed() == {spec.name for spec in SPECS["trained_lora"]}
    assert str(path) in result.findings()["reload_equals"].rows[0]["where"]


def test_a_folder_without_provenance_fails_every_check(result: Result) -> None:
    (result.lora / "provenance.json").unlink()
    assert result.failed() == {spec.name for spec in SPECS["trained_lora"]}
