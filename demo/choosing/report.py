"""Report of the study: the chosen, the last and the step with the lowest validation loss against the best.

A step's truth is the fraction of pictures of the concept with the right shape, colour and background. The
best step has the highest truth among the steps that lost at most `MAX_LOST` on known shapes. A run without
such a step has no best step, and the right answer is to choose none.

Steps that may be the best have more pictures than the others, which are compared with them on the pictures
that they have. The highest of several measured values is too high by luck. So the best step is found with one
half of the pictures of each prompt, all methods are compared with it on the other half, and the ratio is the
mean of both ways. All steps have the same prompts and seeds, and the standard error is that of paired
pictures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from demo.choosing.datasets import NAME
from demo.learned import MAX_LOST
from demo.world import Array
from pipeline.evaluation.choice import Choice, choose
from pipeline.evaluation.numbers import SCORES, measured

MIN_RATIO = 0.97
"""Minimum truth of a chosen step, relative to the best step."""

MIN_LEARNED = 0.1
"""Minimum truth of a best step; a step below it has learned nothing."""

LIMITS: Mapping[str, float] = {"drift": 0.06}
"""Limits of the choice. In trial runs with other seeds, a loss of 0.1 on known shapes had this drift.

The study draws no captions of trained pictures for `copies`; `copies` in the stored runs has another formula.
"""

_HALVES = (slice(0, None, 2), slice(1, None, 2))


@dataclass(frozen=True)
class Published:
    """Worth of a step that a method published.

    Attributes:
        ratio: Truth relative to the best step; NaN if the run has none.
        error: Standard error of `ratio`.
        lost: Loss on known shapes.
    """

    step: int
    ratio: float
    error: float
    lost: float

    @property
    def is_good(self) -> bool:
        """Whether the step reaches both targets."""
        return self.ratio >= MIN_RATIO and self.lost <= MAX_LOST

    @property
    def may_be_good(self) -> bool:
        """Whether the step reaches both targets, or misses the ratio by at most two standard errors."""
        return self.ratio + 2 * self.error >= MIN_RATIO and self.lost <= MAX_LOST


@dataclass(frozen=True)
class FinishedRun:
    """Results of one run, from the base model's step 0 to the last step."""

    name: str
    lines: Sequence[Mapping[str, Any]]

    @cached_property
    def concept(self) -> dict[int, Array]:
        """Pictures of the concept by step: array (prompts, pictures) with 1 for a right one."""
        return {line["step"]: _digits(line["concept"]) for line in self.lines}

    @cached_property
    def known(self) -> dict[int, Array]:
        """The same for pictures of known shapes."""
        return {line["step"]: _digits(line["known"]) for line in self.lines}

    @property
    def steps(self) -> list[int]:
        """Steps of the run, without the base model."""
        return [line["step"] for line in self.lines[1:]]

    @cached_property
    def keeping(self) -> list[int]:
        """Steps with all pictures that lost at most `MAX_LOST` on known shapes."""
        complete = self.concept[0].shape
        return [
            step
            for step in self.steps
            if self.concept[step].shape == complete and self.lost(step) <= MAX_LOST
        ]

    @cached_property
    def has_best(self) -> bool:
        """Whether a step has learned the concept and kept known shapes."""
        return bool(self.keeping) and self.best_truth >= MIN_LEARNED

    def best(self, half: slice = slice(None)) -> int:
        """Return the step of `keeping` with the highest truth in some pictures; the first of equals."""
        return max(self.keeping, key=lambda step: self.concept[step][:, half].mean())

    @cached_property
    def best_truth(self) -> float:
        """Truth of the best step, found and measured on different pictures."""
        return sum(
            float(self.concept[self.best(found)][:, other].mean()) for found, other in _both_ways()
        ) / len(_HALVES)

    def last(self) -> int:
        """Return the last step."""
        return self.steps[-1]

    def lowest_loss(self) -> int:
        """Return the step with the lowest validation loss."""
        return min(self.lines[1:], key=lambda line: line["validation_loss"])["step"]

    def choice(self, scorer: str) -> Choice:
        """Return the evaluation's choice with one scorer."""
        return choose(measured(_scores(self.lines[1:], scorer)), LIMITS)

    def published(self, step: int) -> Published:
        """Return the worth of a step."""
        if not self.has_best:
            return Published(step, math.nan, math.nan, self.lost(step))
        ratios: list[float] = []
        variance = 0.0
        for found, other in _both_ways():
            width = self.concept[step].shape[1]
            own, best = (self.concept[each][:, :width][:, other].ravel() for each in (step, self.best(found)))
            ratio = own.mean() / best.mean()
            ratios.append(float(ratio))

            # Delta method for a ratio of two means over the same pictures.
            variance += float(np.var(own - ratio * best, ddof=1)) / len(own) / float(best.mean()) ** 2
        return Published(step, sum(ratios) / 2, math.sqrt(variance) / 2, self.lost(step))

    def lost(self, step: int) -> float:
        """Return how much the step has lost on known shapes."""
        own = self.known[step]
        return round(float((self.known[0][:, : own.shape[1]] - own).mean()), 4)


def _both_ways() -> Iterable[tuple[slice, slice]]:
    return zip(_HALVES, reversed(_HALVES), strict=True)


def _digits(prompts: Sequence[str]) -> Array:
    return np.array([[int(digit) for digit in each] for each in prompts], dtype=np.float64)


def read_runs(file: Path) -> list[FinishedRun]:
    """Return the runs in a file of results, which has one JSON line per run and step."""
    by_run: dict[str, list[Mapping[str, Any]]] = {}
    for text in file.read_text("utf-8").splitlines() if file.exists() else ():
        line = json.loads(text)
        by_run.setdefault(line["run"], []).append(line)
    return [FinishedRun(name, sorted(lines, key=lambda line: line["step"])) for name, lines in by_run.items()]


def _scores(lines: Iterable[Mapping[str, Any]], scorer: str) -> pl.DataFrame:
    rows = [
        {
            "step": line["step"],
            "strength": 1.0,
            "prompt": f"{prompt:03d}",
            "role": "base" if number == "drift" else "concept",
            "concept": "" if number == "drift" else NAME,
            "seed": seed,
            "scorer": scorer,
            "number": number,
            "score": value,
            "picture": "",
        }
        for line in lines
        for number, grid in line[scorer].items()
        for prompt, values in enumerate(grid)
        for seed, value in enumerate(values)
    ]
    return pl.DataFrame(rows, schema=SCORES)


METHODS: Mapping[str, Callable[[FinishedRun], int | None]] = {
    "chosen, world": lambda run: run.choice("world").step,
    "chosen, pixels": lambda run: run.choice("pixels").step,
    "last step": FinishedRun.last,
    "lowest validation loss": FinishedRun.lowest_loss,
}
"""Ways to choose the step that is published. None means that it is not decided."""


def report(runs: Sequence[FinishedRun]) -> str:
    """Return a table of the runs, of the methods and of the cost, as Markdown."""
    runs = sorted(runs, key=lambda run: run.name)
    published: dict[str, list[Published | None]] = {
        name: [None if (step := method(run)) is None else run.published(step) for run in runs]
        for name, method in METHODS.items()
    }
    return "\n".join(
        [*_runs_table(runs, published), "", *_methods_table(runs, published), "", *_cost_table(runs), ""]
    )


def _runs_table(
    runs: Sequence[FinishedRun], published: Mapping[str, Sequence[Published | None]]
) -> list[str]:
    lines = ["| run | best step | " + " | ".join(published) + " |", "|---" * (len(published) + 2) + "|"]
    for row, run in enumerate(runs):
        best = f"{run.best()}: {run.best_truth:.2f}" if run.has_best else "none"
        cells = [run.name, best]
        cells += [_cell(steps[row]) for steps in published.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cell(published: Published | None) -> str:
    if published is None:
        return "not decided"
    ratio = "" if math.isnan(published.ratio) else f": {published.ratio:.2f} ± {published.error:.2f}"
    lost = f", lost {published.lost:.2f}" if published.lost > MAX_LOST else ""
    return f"{published.step}{ratio}{lost}"


def _methods_table(
    runs: Sequence[FinishedRun], published: Mapping[str, Sequence[Published | None]]
) -> list[str]:
    with_best = [row for row, run in enumerate(runs) if run.has_best]
    lines = [
        f"{len(runs)} runs. {len(with_best)} have a best step; in the others, each step that learned the "
        f"concept lost more than {MAX_LOST} on known shapes.",
        "",
        "| method | decided | good | misses within two errors | lost > 0.1 "
        "| mean ratio of the others | the last step's | none chosen where none is good |",
        "|---" * 8 + "|",
    ]
    last = published["last step"]
    for name, steps in published.items():
        decided = [(row, step) for row in with_best if (step := steps[row]) is not None]
        misses = [step for _, step in decided if not step.is_good]
        num_declined = sum(step is None for row, step in enumerate(steps) if row not in with_best)
        cells = [
            name,
            f"{len(decided)} of {len(with_best)}",
            str(len(decided) - len(misses)),
            f"{sum(step.may_be_good for step in misses)} of {len(misses)}",
            str(sum(step.lost > MAX_LOST for _, step in decided)),
            _mean_ratio([step for _, step in decided]),
            _mean_ratio([last[row] for row, _ in decided]),
            f"{num_declined} of {len(runs) - len(with_best)}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _mean_ratio(steps: Sequence[Published | None]) -> str:
    # A step that lost known shapes may draw the concept better than the best one.
    present = [step for step in steps if step is not None and step.lost <= MAX_LOST]
    if not present:
        return ""
    mean = sum(step.ratio for step in present) / len(present)
    error = math.sqrt(sum(step.error**2 for step in present)) / len(present)
    return f"{mean:.3f} ± {error:.3f}"


def _cost_table(runs: Sequence[FinishedRun]) -> list[str]:
    seconds = [run.lines[0]["cpu_seconds"] for run in runs]
    if not seconds:
        return []
    means = {part: sum(each[part] for each in seconds) / len(seconds) for part in seconds[0]}
    labels = {
        "training": "training",
        "pictures": "pictures of the evaluation",
        "features": "features of two scorers",
        "truth": "pictures of the truth, only for this study",
    }
    lines = ["| part | CPU seconds per run | relative to training |", "|---|---|---|"]
    lines += [
        f"| {label} | {means[part]:.1f} | {means[part] / means['training']:.2f} |"
        for part, label in labels.items()
    ]
    return lines
