"""The checks of trained_lora: what lies in `lora/` is the whole result of a run that went well.

Everything is read anew and without torch: the files themselves, and what their run has recorded of them.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from pipeline.checks.findings import CheckContext, Finding, Outcome, findings
from pipeline.errors import TrainingError, counted, verb
from pipeline.recipe import LoraSettings, with_overrides
from pipeline.recipe.gates import SPECS
from pipeline.trained_lora.export.lora_files import (
    LAYOUTS,
    PROVENANCE_FILE,
    Layout,
    LoraFile,
    LoraModule,
    factors,
    layout_file,
    lengths,
    module_scale,
    read_lora_file,
)
from pipeline.trained_lora.outcome_checks import loss_fell, modules_touched, output_changed, validation_loss
from pipeline.trained_lora.run_folder import Metrics, RunLayout, read_metrics, run_folder

_AGAIN = "delete lora/ and materialize trained_lora again"


@dataclass(frozen=True)
class _Result:
    """What a run left: its record, its metrics, and the files in `lora/` by layout."""

    steps: int
    asked_steps: int
    asked: LoraSettings
    metrics: list[Metrics]
    validation: list[Metrics]
    output_change: float
    loss_trend: dict[str, float] | None
    modules: list[LoraModule]
    recorded: dict[str, dict[str, Any]]
    files: dict[Layout, LoraFile]


def run(context: CheckContext) -> list[Finding]:
    """One finding for each check of trained_lora, in the order of `names.SPECS`."""
    try:
        result = _read(context)
    except TrainingError as err:
        missing = Outcome(False, err.what, err.fix, rows=[{"where": err.where}])
        return findings(context, "trained_lora", {spec.name: missing for spec in SPECS["trained_lora"]})
    norms = _norms(result)
    outcomes = {
        "loss_finite": _loss_finite(result),
        "adapter_not_zero": _adapter_not_zero(norms),
        "reload_equals": _reload_equals(result),
        "plan_completed": _plan_completed(result),
        "shape_uniformity": _shapes(result),
        "file_size_outliers": _file_sizes(result),
        "output_changed": output_changed(result.output_change),
        "loss_fell": loss_fell(result.loss_trend, result.steps),
        "validation_loss": validation_loss(result.validation),
        "modules_touched": modules_touched(norms),
    }
    return findings(context, "trained_lora", outcomes)


def _read(context: CheckContext) -> _Result:
    # What was asked for is the recipe's, but for what the run that made these files was given in its place.
    recipe = with_overrides(context.recipe, (context.report("trained_lora") or {}).get("overrides") or {})
    lora = recipe.output_dir / "lora"
    record = _json(lora / PROVENANCE_FILE)
    layout = RunLayout(run_folder(recipe.output_dir, str(record.get("run"))))
    finished = _json(layout.finished)
    try:
        # How many steps an epoch has is known to the run that counted them.
        counted = finished.get("epochs") == recipe.training.epochs is not None
        steps = int(finished["steps"]) if counted else recipe.training.num_steps
        return _Result(
            steps=int(finished["steps"]),
            asked_steps=steps,
            asked=recipe.training.lora,
            metrics=read_metrics(layout.metrics, steps),
            validation=read_metrics(layout.validation, steps + 1),
            output_change=float(finished["output_change"]),
            loss_trend=finished["loss_trend"],
            modules=[LoraModule.from_json(module) for module in finished["modules"]],
            recorded={item["name"]: item for item in finished["files"]},
            files={each: read_lora_file(lora / layout_file(each, recipe.name)) for each in LAYOUTS},
        )
    except (KeyError, TypeError, ValueError) as err:
        what = f"the record of the run is damaged: {err}"
        raise TrainingError(what, where=str(layout.finished), fix=_AGAIN) from err


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        what = f"there is no finished run to look at: {path.name} cannot be read"
        raise TrainingError(what, where=str(path), fix=_AGAIN) from err
    return cast("dict[str, Any]", value if isinstance(value, dict) else {})


def _loss_finite(result: _Result) -> Outcome:
    odd = [line for line in result.metrics if not math.isfinite(line["loss"])]
    rows = [{"step": line["step"], "loss": str(line["loss"])} for line in odd]
    recorded = counted(len(result.metrics), "recorded loss", "recorded losses")
    summary = f"{len(odd)} of {recorded} {verb(len(odd), 'is', 'are')} no finite number"
    numbers = {"steps": len(result.metrics)}
    if odd or not result.metrics:
        fix = "lower training.learning_rate and train again"
        return Outcome(False, summary, fix, rows=rows, numbers=numbers)
    return Outcome(
        True, f"each of {counted(len(result.metrics), 'loss', 'losses')} is finite", numbers=numbers
    )


def _plan_completed(result: _Result) -> Outcome:
    have = {line["step"] for line in result.metrics}
    lacking = [step for step in range(result.asked_steps) if step not in have]
    numbers = {"steps": result.steps, "asked_steps": result.asked_steps}
    if result.steps != result.asked_steps or lacking:
        summary = f"the run did {result.steps} of {counted(result.asked_steps, 'step')}, "
        summary += counted(len(lacking), "has", "have") + " no metrics"
        fix = "materialize trained_lora again: it goes on from the last checkpoint"
        return Outcome(False, summary, fix, rows=[{"step": step} for step in lacking], numbers=numbers)
    return Outcome(True, f"{counted(result.steps, 'step is', 'steps are')} done, as planned", numbers=numbers)


def _norms(result: _Result) -> dict[str, float]:
    """Of each module's delta weights, as the diffusers layout has them.

    Where the adapter began as a part of the base weights, the product's two halves nearly cancel: what
    rounding alone leaves of it counts as zero.
    """
    file = result.files["diffusers"]
    norms: dict[str, float] = {}
    for module in result.modules:
        down, up, _ = module.keys("diffusers")
        if down in file.tensors and up in file.tensors:
            rows, columns = (file.tensors[key].reshape(len(file.tensors[key]), -1) for key in (up, down))
            if result.asked.of_network(module.name).begins_as_part:
                rows, columns = rows.astype(np.float64), columns.astype(np.float64)
            norm = float(np.linalg.norm(rows @ columns))
            least = 1e-12 * float(np.linalg.norm(rows) * np.linalg.norm(columns))
            norms[module.name] = norm * module.alpha / module.rank if norm > least else 0.0
    return norms


def _adapter_not_zero(norms: dict[str, float]) -> Outcome:
    zero = [name for name, norm in norms.items() if norm == 0.0]
    odd = [name for name, norm in norms.items() if not math.isfinite(norm)]
    numbers = {
        "modules": len(norms),
        "zero_modules": len(zero),
        "largest_norm": max(norms.values(), default=0.0),
    }
    if odd or not norms or len(zero) == len(norms):
        summary = f"{len(zero)} of {counted(len(norms), 'module')} with delta weights of zero, "
        summary += f"{len(odd)} with no finite ones"
        fix = "train more steps, or with a larger training.learning_rate"
        return Outcome(False, summary, fix, rows=[{"module": name} for name in odd or zero], numbers=numbers)
    summary = (
        f"{len(norms) - len(zero)} of {counted(len(norms), 'module')} with delta weights other than zero"
    )
    return Outcome(True, summary, numbers=numbers)


def _reload_equals(result: _Result) -> Outcome:
    """The bytes are those that the run read back and compared; and the layouts hold the same numbers."""
    rows: list[dict[str, Any]] = []
    for layout, file in result.files.items():
        recorded = result.recorded.get(file.path.name, {})
        if recorded.get("sha256") != hashlib.sha256(file.path.read_bytes()).hexdigest():
            rows.append({"file": file.path.name, "module": "", "reason": "other bytes than the run verified"})
        rows += [
            {"file": file.path.name, "module": module.name, "reason": reason}
            for module in result.modules
            if (reason := _difference(result, file, module, layout))
        ]
    errors = {name: item.get("max_error") for name, item in result.recorded.items()}
    if rows:
        summary = counted(len(rows), "file or module does", "files or modules do")
        summary += " not give back what was trained"
        return Outcome(False, summary, _AGAIN, rows=rows, numbers=errors)
    summary = f"{counted(len(result.files), 'file gives', 'files give')} back the delta weights of "
    summary += counted(len(result.modules), "module")
    return Outcome(True, summary, numbers=errors)


def _difference(result: _Result, file: LoraFile, module: LoraModule, layout: Layout) -> str:
    """Why the module's adapter in `file` is not that of the diffusers layout; empty when it is."""
    reference = result.files["diffusers"]
    try:
        scale, expected = (
            module_scale(file, module, layout),
            result.asked.of_network(module.name).scale_of(module.name, conv=module.is_convolution),
        )
    except TrainingError as err:
        return err.what
    if not math.isclose(scale, expected, rel_tol=1e-6):
        return f"scaled by {scale}, asked for {expected}"
    try:
        expected_factors = factors(reference.tensors, module, "diffusers")
        found = factors(file.tensors, module, layout)
        own_lengths = lengths(reference.tensors, module, "diffusers") if module.magnitude else np.ones(1)
        other_lengths = lengths(file.tensors, module, layout) if module.magnitude else np.ones(1)
    except KeyError as err:
        return f"{err.args[0]} is missing"
    for key, own, other in zip(module.keys(layout)[:2], expected_factors, found, strict=True):
        if not np.array_equal(own, other):
            return f"{key} holds other numbers than the diffusers layout"
    if not np.isfinite(other_lengths).all() or (
        layout != "comfyui" and not np.array_equal(own_lengths, other_lengths)
    ):
        return f"{module.magnitude_key(layout)} holds other lengths than the diffusers layout"
    return ""


def _shapes(result: _Result) -> Outcome:
    rows: list[dict[str, Any]] = []
    for layout, file in result.files.items():
        expected = _expected_shapes(result, layout)
        found = {key: tensor.shape for key, tensor in file.tensors.items()}
        rows += [
            {
                "file": file.path.name,
                "key": key,
                "shape": str(found.get(key)),
                "asked": str(expected.get(key)),
            }
            for key in sorted({*found, *expected})
            if found.get(key) != expected.get(key)
        ]
    ranks = sorted({_asked_rank(result, module) for module in result.modules})
    asked = f"rank {', '.join(map(str, ranks))}"
    if rows or not result.modules:
        summary = counted(len(rows), "key is", "keys are")
        summary += f" missing, unknown, or of another shape than {asked} asks for"
        return Outcome(False, summary, _AGAIN, rows=rows)
    summary = f"all keys of {counted(len(result.modules), 'module')} have {asked} in each layout"
    numbers = {"modules": len(result.modules), "rank": ranks[-1]}
    return Outcome(True, summary, numbers=numbers)


def _expected_shapes(result: _Result, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Key to shape of every tensor in the layout's file, for the ranks that the recipe asks for."""
    asked = (replace(module, rank=_asked_rank(result, module)) for module in result.modules)
    return {key: shape for module in asked for key, shape in module.shapes(layout).items()}


def _asked_rank(result: _Result, module: LoraModule) -> int:
    weight = (module.out_features, module.in_features, *module.kernel)
    return result.asked.of_network(module.name).file_rank_of(module.name, weight)


def _file_sizes(result: _Result) -> Outcome:
    rows: list[dict[str, Any]] = []
    for layout, file in result.files.items():
        values = sum(math.prod(shape) for shape in _expected_shapes(result, layout).values())
        expected = file.header_bytes + 4 * values
        if file.num_bytes != expected:
            rows.append({"file": file.path.name, "bytes": file.num_bytes, "expected_bytes": expected})
    numbers = {file.path.name: file.num_bytes for file in result.files.values()}
    if rows:
        summary = counted(len(rows), "file has another size", "files have other sizes")
        summary += " than their keys and ranks ask for"
        return Outcome(False, summary, _AGAIN, rows=rows, numbers=numbers)
    return Outcome(
        True, f"{counted(len(result.files), 'file')} of exactly the expected bytes", numbers=numbers
    )
