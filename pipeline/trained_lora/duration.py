"""How long trainings take on this machine, for the estimates of `latentline plan`.

A training records its speed and its startup twice in `speed.json`: for its base model and recipe, and for its
base model alone, which is the estimate for a recipe that has not been trained here yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.encoding.speed import record_speed, recorded_speed
from pipeline.trained_lora.run_folder import RunLayout, read_metrics

if TYPE_CHECKING:
    from pipeline.cache.recipe_entries import RecipeEntries
    from pipeline.trained_lora.job import TrainingJob
    from pipeline.trained_lora.next_action import NextAction

MIN_MEASURED_STEPS = 5
"""Minimum number of steps of an interrupted run from which its own speed is estimated."""


@dataclass(frozen=True)
class Duration:
    """Estimated time of a training, with process start and previews; the attributes are in `plan --json`.

    Attributes:
        basis: What the estimate is from, such as "the last training of this recipe".
    """

    seconds: float
    basis: str


def record_duration(entries: RecipeEntries, job: TrainingJob, finished: Mapping[str, Any]) -> None:
    """Record the speed and the startup of a training that has ended; `finished` is the run's record."""
    num_steps = finished["steps"] - finished["resumed_from"]
    if num_steps < 1:
        return
    seconds = finished["ended_at_s"] - finished["started_at_s"]
    for name in _names(entries, job):
        record_speed(entries.machine_state_dir, name, seconds / (num_steps * _step_cost(job)))
        record_speed(entries.machine_state_dir, f"start of {name}", finished["startup_s"])


def expected_duration(entries: RecipeEntries, job: TrainingJob, action: NextAction) -> Duration | None:
    """Return how long the training takes on this machine; None if no training of the model was measured."""
    if action.steps_left == 0:
        return Duration(0.0, "nothing is trained")
    bases = ("the last training of this recipe", "a training of this base model with another recipe")
    for name, basis in zip(_names(entries, job), bases, strict=True):
        speed = recorded_speed(entries.machine_state_dir, name)
        if speed is not None:
            startup_s = recorded_speed(entries.machine_state_dir, f"start of {name}") or 0.0
            return Duration(startup_s + speed * action.steps_left * _step_cost(job), basis)

    # A run that was stopped before any training had ended.
    lines = read_metrics(RunLayout(job.folder).metrics, action.steps)
    if len(lines) < MIN_MEASURED_STEPS:
        return None
    # The median, because the first steps also compile and load.
    return Duration(median(line["seconds"] for line in lines) * action.steps_left, "the steps of this run")


def _names(entries: RecipeEntries, job: TrainingJob) -> tuple[str, str]:
    of_model = f"training of {entries.fingerprint('denoiser')[:16]}"
    return f"{of_model} with {job.recipe.name}", of_model


def _step_cost(job: TrainingJob) -> float:
    """Return the pixels that one process trains in an optimizer step, on average."""
    training, table = job.recipe.training, job.inputs.trained.table
    pixels = pl.col("target_height").cast(pl.Float64) * pl.col("target_width")
    mean_pixels = table.select((pixels * pl.col("repeats")).sum() / pl.col("repeats").sum()).item()
    return training.batch_size * training.gradient_accumulation * float(mean_pixels)
