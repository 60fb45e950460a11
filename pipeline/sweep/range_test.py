"""A learning-rate range test: a short run with a rising rate, and the rate that its losses suggest.

The rate rises exponentially from step to step (Smith, Cyclical Learning Rates for Training Neural Networks,
2017, https://arxiv.org/abs/1506.01186). A second run with a rate of almost zero sees the same images with the
same noise, and its losses are subtracted: what is left is what the rate has changed. The suggestion is a
tenth of the rate at which the smoothed loss is lowest, a rule of fastai's `lr_find`
(https://docs.fast.ai/callback.schedule.html#learner.lr_find).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import SweepError, TrainingError, counted
from pipeline.log import NOTE, Log
from pipeline.reporting.pictures import chart, png
from pipeline.reporting.reports import write_report
from pipeline.storage.atomic import write_bytes
from pipeline.trained_lora.fingerprint import run_id
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.trained_lora.stage import plan_run, require_open_gates, train_part

if TYPE_CHECKING:
    import polars as pl

    from pipeline.processes.launch import Launch
    from pipeline.recipe import Recipe

ASSET = "range_test"
"""Name of the report, and of the folder of the picture."""

NUM_STEPS = 100

FACTOR = 100.0
"""The rate rises from the recipe's rate divided by this number to the recipe's rate times it."""

_SETTINGS: dict[str, Any] = {
    "epochs": None,
    "lr_scheduler": "constant",
    "warmup_steps": 0,
    "decay_steps": 0,
    "sample_every": 0,
    "validate_every": 0,
    "ema_decay": None,
    "trackers": (),
}
"""Settings of the two runs that replace the recipe's."""

_CONTROL_RATE = 1e-12

_SMOOTHING = 0.9
"""Weight of the steps before in the moving average of the losses."""

_MIN_STEPS = 20
"""Minimum number of steps with finite losses."""

_OWN_RATE = ("prodigy", "schedule_free")
"""Optimizers whose rate is not tested in this way, because they adapt or average."""


@dataclass(frozen=True)
class RangeTest:
    """Result of a range test.

    Attributes:
        rates: Rate of each step.
        changes: Loss of each step minus the loss of the run with a rate of almost zero.
        smoothed: Moving average of the changes.
        suggested: Rate to use; None if the loss never fell.
    """

    rates: tuple[float, ...]
    changes: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggested: float | None

    @property
    def why(self) -> str:
        """The result in words."""
        if self.suggested is None:
            return "no rate lowered the loss: raise training.learning_rate, around which rates are tested"
        lowest = 10 * self.suggested
        return (
            f"learning_rate {self.suggested:.2g}: the smoothed loss is lowest at {lowest:.2g}, and a tenth "
            "of that rate is used"
        )


def suggest(rates: Sequence[float], changes: Sequence[float]) -> RangeTest:
    """Return the result for the changes of the loss by step, up to the first that is not finite."""
    finite = next((n for n, change in enumerate(changes) if not math.isfinite(change)), len(changes))
    smoothed = _smoothed(changes[:finite])
    lowest = min(range(finite), key=lambda step: smoothed[step], default=None)
    suggested = rates[lowest] / 10 if lowest is not None and smoothed[lowest] < 0 else None
    return RangeTest(tuple(rates[:finite]), tuple(changes[:finite]), smoothed, suggested)


def _smoothed(values: Sequence[float]) -> tuple[float, ...]:
    """Return the exponential moving average, corrected for its start at 0."""
    average, smoothed = 0.0, list[float]()
    for number, value in enumerate(values, start=1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * value
        smoothed.append(average / (1 - _SMOOTHING**number))
    return tuple(smoothed)


def find_learning_rate(
    recipe: Recipe,
    latents: pl.DataFrame,
    text: pl.DataFrame,
    *,
    steps: int = NUM_STEPS,
    launch: Launch,
    log: Log,
) -> RangeTest:
    """Run the range test of a recipe, and write its report and picture; runs and `lora/` stay as they are.

    Args:
        recipe: The recipe, around whose rate the test is done.
        latents: Table of vae_latents.
        text: Table of text_embeddings.
        steps: Number of steps of each of the two runs.
        launch: Launches the training.
        log: Log of the command.

    Raises:
        GateClosedError: An upstream gate is closed; nothing was launched.
        SweepError: The optimizer adapts its rate, or the losses are not finite from the start.
        TrainingError: Training failed for another reason than its losses.
    """
    require_open_gates(recipe, log=log)
    training = recipe.training
    if training.optimizer in _OWN_RATE:
        raise SweepError(
            f"the rate of the optimizer {training.optimizer} cannot be tested, because it adapts it",
            where=f"{recipe.source}, training.optimizer",
            fix="use the rate that its authors recommend, or another optimizer",
        )
    low, high = training.learning_rate / FACTOR, training.learning_rate * FACTOR
    log(f"{NOTE}two runs of {counted(steps, 'step')}: rates from {low:.2g} to {high:.2g}, and almost zero")
    training = training.model_copy(update={**_SETTINGS, "steps": steps, "checkpoint_every": steps})
    short = recipe.model_copy(update={"training": training, "sweep": None})
    with tempfile.TemporaryDirectory(prefix="latentline-") as folder:
        rising, control = (
            _run(short, (latents, text), ends, Path(folder), launch=launch, log=log)
            for ends in ((low, high), (_CONTROL_RATE, _CONTROL_RATE))
        )
    changes = [line["loss"] - other["loss"] for line, other in zip(rising, control, strict=False)]
    result = suggest([line["learning_rate"] for line in rising], changes)
    if len(result.rates) < _MIN_STEPS:
        raise SweepError(
            f"the losses are finite in only {counted(len(result.rates), 'step')}",
            where=f"{recipe.source}, training.learning_rate",
            fix="lower training.learning_rate, around which rates are tested",
        )
    _write(recipe, result)
    return result


def _run(
    recipe: Recipe,
    tables: tuple[pl.DataFrame, pl.DataFrame],
    ends: tuple[float, float],
    folder: Path,
    *,
    launch: Launch,
    log: Log,
) -> list[dict[str, Any]]:
    """Train a run with a rising rate in `folder`, and return its metrics until a loss is not finite."""
    entries = RecipeEntries(recipe, log=log)
    job, facts, table = plan_run(entries, *tables, log=log)
    facts = {**facts, "rising_rate": list(ends)}
    # Not among the recipe's runs, with which later runs are compared.
    local = {"output_dir": folder, "output_address": folder}
    job = replace(job, recipe=job.recipe.model_copy(update=local), run=run_id(facts), rising_rate=ends)
    layout = RunLayout(job.folder)
    try:
        train_part(entries, job, facts, table, launch=launch, log=log)
    except TrainingError:
        # A rate that is too high ends the run, and shows where that is.
        if not read_metrics(layout.metrics, recipe.training.num_steps):
            raise
    return read_metrics(layout.metrics, recipe.training.num_steps)


def _write(recipe: Recipe, result: RangeTest) -> None:
    report = {
        "suggested": result.suggested,
        "why": result.why,
        "rates": list(result.rates),
        "changes": list(result.changes),
        "smoothed": list(result.smoothed),
        "recipe": recipe.name,
    }
    write_report(recipe.output_dir, ASSET, report)
    figure, axes = chart(560, 360)
    axes.plot(result.rates, result.changes, ".", color="lightgrey", markersize=3)
    axes.plot(result.rates, result.smoothed, color="tab:blue")
    if result.suggested is not None:
        axes.axvline(result.suggested, color="tab:green", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("change of the loss")
    write_bytes(recipe.output_dir / "reports" / ASSET / "rates.png", png(figure))
