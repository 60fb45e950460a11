"""Checks of trained_lora: the published LoRA is complete, intact, and the result of a sound run.

To add a check, such as a gate on the final loss: write a function here that returns an `Outcome`, and add
it to `outcomes` in `run`. Declare the check under the same name in `pipeline/recipe/check_specs.py`, then
generate the pages that list all checks (CONTRIBUTING.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from pipeline.errors import TrainingError, counted, verb
from pipeline.recipe import LoraSettings, Recipe, changed_values, recipe_values, with_overrides
from pipeline.recipe.check_specs import SPECS
from pipeline.reporting.findings import CheckContext, Finding, Outcome, findings
from pipeline.storage.regular_files import file_sha256
from pipeline.trained_lora.export.lora_files import (
    PROVENANCE_FILE,
    Layout,
    LoraFile,
    LoraModule,
    factors,
    folded,
    is_factor,
    layout_file,
    layouts_of,
    module_scale,
    native_file_name,
    read_lora_file,
    stored_magnitudes,
)
from pipeline.trained_lora.run_folder import (
    LORA_RECORD,
    Metrics,
    RunLayout,
    lora_steps,
    read_metrics,
    run_folder,
)

MIN_STEPS = 50
"""Minimum number of steps for the loss trend. The fifths of shorter runs hold too few losses to compare."""

RISE = 1.01
"""Ratio of the last validation loss to the lowest above which it counts as having risen."""

_ROUNDING = 1e-12
"""Norm of a product below this share of its factors' norms is rounding error and counts as zero."""

_ROUNDED = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7}
"""Relative error of a factor that holds a part of the scale, by `lora.save_dtype`."""

_SUBNORMAL = 2.0**-24
"""Smallest positive number of float16, the absolute error of smaller numbers."""

_PUBLISH_AGAIN = "start the job again, which writes the files in lora/ again"


@dataclass(frozen=True)
class _Result:
    """The published files by layout, and the record and metrics of their run.

    `settings` and `planned_steps` are what the recipe requests; `recorded` has each file's entry in the run's
    record, by file name.
    """

    folder: Path
    settings: LoraSettings
    planned_steps: int
    steps: int
    metrics: list[Metrics]
    validation: list[Metrics]
    output_change: float | None
    loss_trend: dict[str, float] | None
    modules: list[LoraModule]
    recorded: dict[str, dict[str, Any]]
    files: dict[Layout, LoraFile]
    native: Path | None

    @cached_property
    def changed_files(self) -> list[str]:
        """Names of published files that changed after the run compared them with the trained weights."""
        paths = [file.path for file in self.files.values()] + ([self.native] if self.native else [])
        return [
            path.name for path in paths if self.recorded.get(path.name, {}).get("sha256") != file_sha256(path)
        ]

    @property
    def fix(self) -> str:
        """What to do about published files that are wrong."""
        # Unchanged files are wrong since the training, and a job would copy them from the run again.
        return _PUBLISH_AGAIN if self.changed_files else f"delete {self.folder} and start the job again"


def run(context: CheckContext) -> list[Finding]:
    """Return one finding per check of trained_lora, in the order of `check_specs.SPECS`."""
    try:
        result = _read_result(context)
    except TrainingError as err:
        unreadable = Outcome(False, err.what, err.fix, rows=[{"where": err.where}])
        return findings(context, "trained_lora", {spec.name: unreadable for spec in SPECS["trained_lora"]})
    norms = _delta_norms(result)
    overrides = (context.report("trained_lora") or {}).get("overrides") or {}
    outcomes = {
        "loss_finite": _loss_finite(result),
        "adapter_not_zero": _adapter_not_zero(norms),
        "reload_equals": _reload_equals(result),
        "plan_completed": _plan_completed(result),
        "shape_uniformity": _shape_uniformity(result),
        "file_size_outliers": _file_size_outliers(result),
        "output_changed": _output_changed(result.output_change),
        "loss_fell": _loss_fell(result.loss_trend, result.steps),
        "validation_loss": _validation_loss(result.validation),
        "modules_touched": _modules_touched(norms),
        "as_declared": _as_declared(context.recipe, overrides),
    }
    return findings(context, "trained_lora", outcomes)


def _read_result(context: CheckContext) -> _Result:
    # The files are compared with the settings of their run: the recipe's, with the run's overrides.
    recipe = with_overrides(context.recipe, (context.report("trained_lora") or {}).get("overrides") or {})
    lora = recipe.output_dir / "lora"
    record = _read_json(lora / PROVENANCE_FILE)
    if not isinstance(record.get("run"), str):
        raise _unreadable(lora / PROVENANCE_FILE)
    layout = RunLayout(run_folder(recipe.output_dir, record["run"]))
    finished = _read_json(layout.finished)
    try:
        # Only the run itself knows the number of steps in its epochs.
        in_epochs = recipe.training.epochs is not None and finished.get("epochs") == recipe.training.epochs
        planned_steps = int(finished["steps"]) if in_epochs else recipe.training.num_steps
        step = int(record.get("step", finished["steps"]))
        # A line of a validation counts the steps done, so the last one is at `planned_steps`.
        return _Result(
            folder=layout.folder,
            settings=recipe.training.lora,
            planned_steps=planned_steps,
            steps=int(finished["steps"]),
            metrics=read_metrics(layout.metrics, planned_steps),
            validation=read_metrics(layout.validation, planned_steps + 1),
            output_change=None if finished["output_change"] is None else float(finished["output_change"]),
            loss_trend=finished["loss_trend"],
            modules=[LoraModule.from_json(module) for module in finished["modules"]],
            recorded=_recorded_files(layout, finished, step=step),
            files={
                each: read_lora_file(lora / layout_file(each, recipe.name))
                for each in layouts_of(recipe.training.lora)
            },
            native=lora / native_file_name(recipe.name) if recipe.training.lora.native_file else None,
        )
    except (KeyError, TypeError, ValueError) as err:
        what = f"the record of the run is damaged: {err}"
        fix = f"delete {layout.finished} and start the job again; it continues from the last checkpoint"
        raise TrainingError(what, where=str(layout.finished), fix=fix) from err


def _recorded_files(
    layout: RunLayout, finished: Mapping[str, Any], *, step: int
) -> dict[str, dict[str, Any]]:
    # `latentline export` may have published a checkpoint, which has hashes of its own.
    if step == finished["steps"]:
        return {item["name"]: item for item in finished["files"]}
    folder = lora_steps(layout).get(step, layout.checkpoints)
    hashes = _read_json(folder / LORA_RECORD).get("sha256", {})
    return {name: {"sha256": sha256} for name, sha256 in hashes.items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise _unreadable(path) from err
    return cast("dict[str, Any]", value if isinstance(value, dict) else {})


def _unreadable(path: Path) -> TrainingError:
    what = f"no finished run can be checked: {path.name} cannot be read"
    return TrainingError(what, where=str(path), fix=_PUBLISH_AGAIN)


def _loss_finite(result: _Result) -> Outcome:
    bad_lines = [line for line in result.metrics if not math.isfinite(line["loss"])]
    rows = [{"step": line["step"], "loss": str(line["loss"])} for line in bad_lines]
    losses = counted(len(result.metrics), "recorded loss", "recorded losses")
    numbers = {"steps": len(result.metrics)}
    if bad_lines or not result.metrics:
        summary = f"{len(bad_lines)} of {losses} {verb(len(bad_lines), 'is', 'are')} not finite"
        fix = "lower training.learning_rate and train again"
        return Outcome(False, summary, fix, rows=rows, numbers=numbers)
    return Outcome(True, f"{losses}, all finite", numbers=numbers)


def _plan_completed(result: _Result) -> Outcome:
    recorded = {line["step"] for line in result.metrics}
    missing = [step for step in range(result.planned_steps) if step not in recorded]
    numbers = {"steps": result.steps, "asked_steps": result.planned_steps}
    if result.steps != result.planned_steps or missing:
        summary = f"the run did {result.steps} of {counted(result.planned_steps, 'step')}, and "
        summary += counted(len(missing), "step has", "steps have") + " no metrics"
        # A finished run is not resumed, and only a training can measure the losses of its steps again.
        fix = "start the job again; it resumes from the last checkpoint"
        if result.steps == result.planned_steps:
            fix = f"delete {result.folder} and start the job again, which trains the run again"
        return Outcome(False, summary, fix, rows=[{"step": step} for step in missing], numbers=numbers)
    return Outcome(True, f"{counted(result.steps, 'step')} done, as planned", numbers=numbers)


def _delta_norms(result: _Result) -> dict[str, float]:
    """Return the norm of each module's delta weights or of its rotation; 0 within rounding error."""
    tensors = result.files["diffusers"].tensors
    norms: dict[str, float] = {}
    for module in result.modules:
        if module.rotation:
            # Without rotation, all numbers are zero.
            if (key := module.rotation_key("diffusers")) in tensors:
                norms[module.name] = float(np.linalg.norm(tensors[key]))
            continue
        down_key, up_key, _ = module.keys("diffusers")
        if down_key not in tensors or up_key not in tensors:
            continue
        up, down = (tensors[key].reshape(len(tensors[key]), -1) for key in (up_key, down_key))
        # The two halves of such a product nearly cancel if nothing was trained, and float32 has too few
        # digits to tell the difference from zero.
        if result.settings.of_network(module.name).starts_from_base_weights:
            up, down = up.astype(np.float64), down.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):  # such weights give a norm that is not finite
            norm = float(np.linalg.norm(up @ down))
            rounding_error = _ROUNDING * float(np.linalg.norm(up) * np.linalg.norm(down))
        is_zero = math.isfinite(norm) and norm <= rounding_error
        norms[module.name] = 0.0 if is_zero else norm * module.alpha / module.rank
    return norms


def _adapter_not_zero(norms: Mapping[str, float]) -> Outcome:
    zero = [name for name, norm in norms.items() if norm == 0.0]
    not_finite = [name for name, norm in norms.items() if not math.isfinite(norm)]
    modules = counted(len(norms), "module")
    numbers = {
        "modules": len(norms),
        "zero_modules": len(zero),
        "largest_norm": max(filter(math.isfinite, norms.values()), default=0.0),
    }
    if not_finite or not norms or len(zero) == len(norms):
        summary = f"of {modules}, {len(zero)} have zero and {len(not_finite)} non-finite delta weights"
        fix = "train more steps, or raise training.learning_rate"
        rows = [{"module": name} for name in not_finite or zero]
        return Outcome(False, summary, fix, rows=rows, numbers=numbers)
    return Outcome(
        True, f"{len(norms) - len(zero)} of {modules} have non-zero delta weights", numbers=numbers
    )


def _modules_touched(norms: Mapping[str, float]) -> Outcome:
    rows = [{"module": name} for name, norm in norms.items() if norm == 0.0]
    modules = counted(len(norms), "module")
    if rows:
        summary = f"the adapters of {len(rows)} of {modules} have no effect"
        return Outcome(False, summary, "exclude them from training.lora.targets", rows=rows)
    return Outcome(True, f"{modules}, all changed by their adapters")


def _as_declared(recipe: Recipe, overrides: Mapping[str, Any]) -> Outcome:
    # A recipe that has been given the same values since then declares them.
    declared, changes = recipe_values(recipe), changed_values(recipe, overrides)
    if not changes:
        return Outcome(True, "trained with the settings of the recipe")
    rows = [{"setting": name, "run": value, "recipe": declared[name]} for name, value in changes.items()]
    listed = ", ".join(f"{name} {value} instead of {declared[name]}" for name, value in changes.items())
    fix = "start the job without overrides, or write these values into the recipe"
    return Outcome(False, f"the LoRA was trained with {listed}", fix, rows=rows)


def _reload_equals(result: _Result) -> Outcome:
    rows: list[dict[str, Any]] = []
    is_rotation = any(module.rotation for module in result.modules)
    difference = _rotation_difference if is_rotation else _layout_difference
    for name in result.changed_files:
        reason = "the file changed after the run verified it"
        rows.append({"file": name, "module": "", "reason": reason})
    for layout, file in result.files.items():
        rows += [
            {"file": file.path.name, "module": module.name, "reason": reason}
            for module in result.modules
            if (reason := difference(result, file, module, layout=layout))
        ]

    errors = {name: item.get("max_error") for name, item in result.recorded.items()}
    if rows:
        summary = counted(len(rows), "file or module differs", "files or modules differ")
        return Outcome(False, f"{summary} from the trained weights", result.fix, rows=rows, numbers=errors)
    files = counted(len(result.files), "file reproduces", "files reproduce")
    modules = counted(len(result.modules), "module")
    return Outcome(True, f"{files} the trained delta weights of {modules}", numbers=errors)


def _layout_difference(result: _Result, file: LoraFile, module: LoraModule, *, layout: Layout) -> str:
    """Return how the module's adapter in `file` differs from the diffusers layout; empty if it does not."""
    settings = result.settings.of_network(module.name)
    expected_scale = settings.scale_of(module.name, conv=module.is_convolution)
    try:
        scale = module_scale(file, module, layout)
    except TrainingError as err:
        return err.what

    # Two layouts store alpha as float32.
    is_in_alpha = math.isclose(scale, expected_scale, rel_tol=1e-6)
    reference = result.files["diffusers"].tensors
    try:
        trained = factors(reference, module, "diffusers")
        expected = trained if is_in_alpha else folded(*trained, expected_scale / scale)
        tolerance = _ROUNDED[result.settings.save_dtype]
        for key, each, actual in zip(
            module.keys(layout)[:2], expected, factors(file.tensors, module, layout), strict=True
        ):
            if is_in_alpha and not np.array_equal(each, actual):
                return f"{key} differs from the diffusers layout"
            if not is_in_alpha and not np.allclose(each, actual, rtol=tolerance, atol=_SUBNORMAL):
                return f"the scale must be {expected_scale}, got {scale}"
        if module.magnitude:
            magnitude = stored_magnitudes(reference, module, "diffusers")
            stored = stored_magnitudes(file.tensors, module, layout)
            # ComfyUI's magnitudes are relative to the base model's rows, which are not stored.
            comparable = layout != "comfyui"
            if not np.isfinite(stored).all() or (comparable and not np.array_equal(magnitude, stored)):
                return f"{module.magnitude_key(layout)} differs from the diffusers layout"
    except KeyError as err:
        return f"{err.args[0]} is missing"
    return ""


def _rotation_difference(result: _Result, file: LoraFile, module: LoraModule, *, layout: Layout) -> str:
    """As `_layout_difference`, for OFT."""
    key, trained = module.rotation_key(layout), module.rotation_key("diffusers")
    reference = result.files["diffusers"].tensors
    if key not in file.tensors or trained not in reference:
        return f"{key} is missing"
    is_equal = np.array_equal(file.tensors[key], reference[trained])
    return "" if is_equal else f"{key} differs from the diffusers layout"


def _shape_uniformity(result: _Result) -> Outcome:
    rows: list[dict[str, Any]] = []
    for layout, file in result.files.items():
        expected = _expected_shapes(result, layout)
        actual = {key: tensor.shape for key, tensor in file.tensors.items()}
        rows += [
            {
                "file": file.path.name,
                "key": key,
                "shape": str(actual.get(key)),
                "asked": str(expected.get(key)),
            }
            for key in sorted({*actual, *expected})
            if actual.get(key) != expected.get(key)
        ]

    ranks = sorted({_expected_rank(result, module) for module in result.modules})
    is_rotation = any(module.rotation for module in result.modules)
    ranks_text = f"{'blocks' if is_rotation else 'rank'} {', '.join(map(str, ranks))}"
    if rows or not result.modules:
        keys = counted(len(rows), "key is", "keys are")
        summary = f"{keys} missing, unexpected, or of another shape than {ranks_text} requires"
        return Outcome(False, summary, result.fix, rows=rows)
    summary = f"all keys of {counted(len(result.modules), 'module')} have {ranks_text} in each layout"
    return Outcome(True, summary, numbers={"modules": len(result.modules), "rank": ranks[-1]})


def _expected_shapes(result: _Result, layout: Layout) -> dict[str, tuple[int, ...]]:
    modules = (replace(module, rank=_expected_rank(result, module)) for module in result.modules)
    return {key: shape for module in modules for key, shape in module.shapes(layout).items()}


def _expected_rank(result: _Result, module: LoraModule) -> int:
    weight = (module.out_features, module.in_features, *module.kernel)
    return result.settings.of_network(module.name).file_rank_of(module.name, weight)


def _file_size_outliers(result: _Result) -> Outcome:
    rows: list[dict[str, Any]] = []
    # The matrices have the dtype of the recipe; alphas and magnitudes are float32 in any file.
    factor_bytes = 4 if result.settings.save_dtype == "float32" else 2
    for layout, file in result.files.items():
        tensor_bytes = sum(
            math.prod(shape) * (factor_bytes if is_factor(key) else 4)
            for key, shape in _expected_shapes(result, layout).items()
        )
        expected_bytes = file.header_bytes + tensor_bytes
        if file.num_bytes != expected_bytes:
            rows.append({"file": file.path.name, "bytes": file.num_bytes, "expected_bytes": expected_bytes})
    numbers = {file.path.name: file.num_bytes for file in result.files.values()}
    if rows:
        files = counted(len(rows), "file differs", "files differ")
        summary = f"{files} in size from what their keys and ranks require"
        return Outcome(False, summary, result.fix, rows=rows, numbers=numbers)
    return Outcome(True, f"{counted(len(result.files), 'file')} of the expected size", numbers=numbers)


def _output_changed(change: float | None) -> Outcome:
    if change is None:
        return Outcome(True, "not measured, because the LoRA is from a checkpoint of a longer run")

    # The worker measured it on one sample at half noise, relative to the output without the adapter.
    numbers = {"output_change": change if math.isfinite(change) else None}
    if not math.isfinite(change):
        summary = f"with the adapter, the model's output is not finite (relative change {change})"
        return Outcome(False, summary, "lower training.learning_rate and train again", numbers=numbers)
    if change == 0.0:
        summary = "the adapter does not change the model's output"
        return Outcome(False, summary, "train more steps, or raise training.learning_rate", numbers=numbers)
    return Outcome(True, f"the adapter changes the model's output by {change:.3%}", numbers=numbers)


def _loss_fell(trend: Mapping[str, float] | None, steps: int) -> Outcome:
    if trend is None or steps < MIN_STEPS:
        done = counted(steps, "step is", "steps are")
        return Outcome(True, f"{done} too few to compare the loss at start and end")
    summary = (
        f"the loss, relative to the average at its timestep, went from {trend['first']:.3f} to "
        f"{trend['last']:.3f} (± {trend['error']:.3f})"
    )
    if trend["last"] < trend["first"]:
        return Outcome(True, summary, numbers=dict(trend))
    fix = "train longer, raise training.learning_rate slightly, or check that captions match their images"
    return Outcome(False, f"{summary}: it did not fall", fix, numbers=dict(trend))


def _validation_loss(validation: Sequence[Metrics]) -> Outcome:
    if not validation:
        return Outcome(True, "no images are held out for validation")
    best, last = min(validation, key=lambda line: line["loss"]), validation[-1]
    numbers = {
        "first": validation[0]["loss"],
        "least": best["loss"],
        "last": last["loss"],
        "least_at_step": best["step"],
    }
    if "gap" in last:
        numbers["last_gap"] = last["gap"]
    if last["loss"] > RISE * best["loss"]:
        summary = f"the validation loss rose from {best['loss']:.4f} at step {best['step']} "
        summary += f"to {last['loss']:.4f} at the end"
        fix = f"set training.steps to about {max(1, best['step'])}, or lower learning_rate or lora.rank"
        return Outcome(False, summary, fix, numbers=numbers)
    return Outcome(
        True, f"the validation loss ended at {last['loss']:.4f}, near its minimum", numbers=numbers
    )
