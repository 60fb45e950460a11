"""Checks of what a training run came to, beside its files: did it do anything, and did it help?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.checks.findings import Outcome
from pipeline.errors import counted, verb
from pipeline.trained_lora.run_folder import Metrics

MIN_STEPS = 50
"""Below, the first and the last fifth of a run are too few losses to tell a fall from chance."""

RISE = 1.01
"""A validation loss at the end above this many times its least is called a rise."""


def output_changed(change: float) -> Outcome:
    """Whether the denoiser answers otherwise with the adapter than without it.

    Args:
        change: Norm of the difference over the norm of the answer without, for one sample at half noise.
    """
    numbers = {"output_change": change if math.isfinite(change) else None}
    if not math.isfinite(change):
        return Outcome(
            False,
            f"with the adapter the model's answer is {change} away from the one without",
            "lower training.learning_rate and train again",
            numbers=numbers,
        )
    if change == 0.0:
        return Outcome(
            False,
            "the model answers with the adapter exactly as without it",
            "train more steps, or with a larger training.learning_rate",
            numbers=numbers,
        )
    return Outcome(True, f"the adapter changes the model's answer by {change:.3%} of it", numbers=numbers)


def loss_fell(trend: Mapping[str, float] | None, steps: int) -> Outcome:
    """Whether the last fifth of the losses is below the first.

    Args:
        trend: `first` and `last`, means of losses over what is usual at their timesteps, and `error`, the
            standard error of their difference; None where there were no losses.
        steps: Of the run.
    """
    if trend is None or steps < MIN_STEPS:
        return Outcome(
            True, f"{counted(steps, 'step is', 'steps are')} too few to tell whether the loss fell"
        )
    first, last, error = trend["first"], trend["last"], trend["error"]
    text = f"the loss went from {first:.3f} to {last:.3f} of what is usual at its timestep (± {error:.3f})"
    if last < first:
        return Outcome(True, text, numbers=dict(trend))
    fix = "train longer, raise training.learning_rate a little, or see that the captions belong to the images"
    return Outcome(False, f"{text}: it did not fall", fix, numbers=dict(trend))


def validation_loss(validation: Sequence[Metrics]) -> Outcome:
    """Whether the loss on held-out samples ended near its least.

    Args:
        validation: Lines of `step` and `loss`, by step.
    """
    if not validation:
        return Outcome(True, "no images are held out for validation")
    least = min(validation, key=lambda line: line["loss"])
    last = validation[-1]
    numbers = {"first": validation[0]["loss"], "least": least["loss"], "last": last["loss"]}
    numbers["least_at_step"] = least["step"]
    if last["loss"] > RISE * least["loss"]:
        what = f"the validation loss rose from {least['loss']:.4f} at step {least['step']}"
        fix = f"set training.steps to about {max(1, least['step'])}, or lower learning_rate or lora.rank"
        return Outcome(False, f"{what} to {last['loss']:.4f}", fix, numbers=numbers)
    return Outcome(True, f"the validation loss ended at {last['loss']:.4f}, its least", numbers=numbers)


def modules_touched(norms: Mapping[str, float]) -> Outcome:
    """Whether every module's delta weights are other than zero.

    Args:
        norms: Of the delta weights, by module.
    """
    rows: list[dict[str, Any]] = [{"module": name} for name, norm in norms.items() if norm == 0.0]
    if rows:
        summary = f"{len(rows)} of {counted(len(norms), 'module')} {verb(len(rows), 'has', 'have')} "
        summary += "an adapter that does nothing"
        return Outcome(False, summary, "leave them out of training.lora.targets", rows=rows)
    return Outcome(True, f"{counted(len(norms), 'module')}, each changed")
