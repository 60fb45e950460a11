"""A learning-rate range test: one short run with a rising rate, and the rate that its losses propose.

The rate rises exponentially from step to step (Smith, Cyclical Learning Rates for Training Neural Networks,
2017, https://arxiv.org/abs/1506.01186). The training loss of a diffusion model hardly shows what a rate does,
because each step has other images, noise and noise levels. The test reads the loss on held-out images, which
all measurements of a run take with the same noise at the same levels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import SweepError, TrainingError, counted
from pipeline.log import NOTE, Log
from pipeline.trained_lora.run_folder import Metrics, RunLayout, read_metrics
from pipeline.trained_lora.stage import plan_run, require_open_gates, train_part

if TYPE_CHECKING:
    import polars as pl

    from pipeline.processes.launch import Launch
    from pipeline.recipe import Recipe

SHARE = 0.4
"""Steps of the test, as a fraction of the recipe's: a short training needs a higher rate than a long one."""

DIVISOR = 5.0
"""The proposal is the rate with the lowest loss divided by this number: see docs/sweeps.md for its trial."""

MAX_MEASUREMENTS, _FEWEST = 20, 8
"""Numbers of measurements, between which the test costs less than a complete run."""

_FORWARD_PASSES = 10
"""Forward passes of a measurement per held-out image: at five noise levels, and as many for its pair."""

_MIN_MEASUREMENTS = 5

_OWN_RATE = ("prodigy", "schedule_free")
"""Optimizers that adapt their rate, or average weights that different rates have trained."""


@dataclass(frozen=True)
class Proposal:
    """Result of a range test.

    Attributes:
        run: Run of the test.
        rate: Learning rate to use.
        why: Reason in words.
    """

    run: str
    rate: float
    why: str


def find_learning_rate(
    recipe: Recipe, latents: pl.DataFrame, text: pl.DataFrame, *, launch: Launch, log: Log
) -> Proposal:
    """Train the range test of a recipe, and propose a rate. The recipe's run and `lora/` stay as they are.

    The test is a run in `runs/` like others: stopped, it resumes, and once finished, it trains nothing.

    Args:
        recipe: The recipe, around whose rate the test is done.
        latents: Table of vae_latents.
        text: Table of text_embeddings.
        launch: Launches the training.
        log: Log of the command.

    Raises:
        GateClosedError: An upstream gate is closed; nothing was launched.
        SweepError: No rate can be proposed.
        TrainingError: Training failed before there were enough measurements.
    """
    require_open_gates(recipe, log=log)
    if recipe.training.optimizer in _OWN_RATE:
        raise SweepError(
            f"the optimizer {recipe.training.optimizer} has no rate that a range test could find",
            where=f"{recipe.source}, training.optimizer",
            fix="use the rate that its authors recommend, or another optimizer",
        )
    planned = plan_run(RecipeEntries(recipe, log=log), latents, text, log=log)[0]
    if planned.inputs.held_out.table.is_empty():
        raise SweepError(
            "a range test needs held-out images, on which it measures the loss",
            where=f"{recipe.source}, datasets",
            fix="set validation_fraction of a dataset, such as 0.1",
        )

    # A recipe may count epochs; the plan counts steps.
    rising = _rising(planned.recipe, num_images=len(planned.inputs.held_out.table))
    entries = RecipeEntries(rising, log=log)
    job, facts, table = plan_run(entries, latents, text, log=log)
    steps, layout = job.recipe.training.num_steps, RunLayout(job.folder)
    log(f"{NOTE}run {job.run} is a range test of {counted(steps, 'step')}")
    try:
        train_part(entries, job, facts, table, launch=launch, log=log)
    except TrainingError as err:
        # A rate that is much too high makes the loss infinite. The measurements before that are the result.
        if len(read_metrics(layout.validation, steps + 1)) < _MIN_MEASUREMENTS:
            raise
        log(f"warning: the test ended early: {err.what}")
    rates = [line["learning_rate"] for line in read_metrics(layout.metrics, steps)]
    return propose(job.run, rates, read_metrics(layout.validation, steps + 1))


def _rising(recipe: Recipe, *, num_images: int) -> Recipe:
    training = recipe.training
    steps = max(2, math.ceil(SHARE * training.num_steps))

    # Training a sample takes about three forward passes. Measurements that take at most half of the complete
    # training leave a tenth of it to the test.
    half = 1.5 * training.batch_size * training.gradient_accumulation
    affordable = math.ceil(SHARE * num_images * _FORWARD_PASSES / half)
    every = min(max(affordable, steps // MAX_MEASUREMENTS), steps // _FEWEST)
    settings: dict[str, Any] = {
        "steps": steps,
        "lr_scheduler": "rising",
        "lr_cycles": 1,
        "lr_power": 1.0,
        "warmup_steps": 0,
        "decay_steps": 0,
        # An average of the weights would lag behind the rates.
        "ema_decay": None,
        "validate_every": max(1, every),
        "sample_every": 0,
    }
    return recipe.model_copy(update={"training": training.model_copy(update=settings), "sweep": None})


def propose(run: str, rates: Sequence[float], measured: Sequence[Metrics]) -> Proposal:
    """Return the proposal for the rates of a run's steps and its validation losses.

    Raises:
        SweepError: The lowest loss is the first or the last one.
    """
    losses = {line["step"]: line["loss"] for line in measured if math.isfinite(line["loss"])}
    lowest = min(losses, key=lambda step: losses[step])
    if lowest in (0, measured[-1]["step"]):
        what, fix = ("does not fall", "lower") if lowest == 0 else ("is lowest at the end", "raise")
        raise SweepError(
            f"the loss on held-out images {what}, with rates from {rates[0]:.2g} to {rates[-1]:.2g}",
            where="training.learning_rate, around which rates are tested",
            fix=f"{fix} it tenfold, and repeat the test",
        )
    at = _vertex(rates, losses, lowest)
    rate = float(f"{at / DIVISOR:.2g}")
    why = (
        f"learning_rate {rate:.2g}: the loss on held-out images falls from {losses[0]:.4g} to "
        f"{losses[lowest]:.4g} at about {at:.2g}, and this rate divided by {DIVISOR:g} is proposed"
    )
    return Proposal(run, rate, why)


def _vertex(rates: Sequence[float], losses: Mapping[int, float], lowest: int) -> float:
    """Return the rate at the vertex of a parabola through the lowest loss and those before and after it."""
    steps = sorted(losses)
    number = steps.index(lowest)
    three = steps[number - 1 : number + 2]
    # Before the first step there was no rate, and a loss that is not finite is absent.
    if three[0] == 0 or len(three) < 3:
        return rates[lowest - 1]
    x = np.log([rates[step - 1] for step in three])
    a, b, _ = np.polyfit(x - x[1], [losses[step] for step in three], 2)
    return rates[lowest - 1] * math.exp(-b / (2 * a)) if a > 0 else rates[lowest - 1]
