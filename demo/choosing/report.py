"""Report of the study: the chosen, the last and the step with the lowest validation loss against the best.

A step's truth is the fraction of pictures of the concept with the right shape, colour and background. The
best step has the highest truth among the steps that lost at most `MAX_LOST` on known shapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from demo.learned import MAX_LOST
from pipeline.evaluation.choice import Choice, choose
from pipeline.evaluation.numbers import SCORES, measured
from pipeline.recipe.evaluation import LimitSettings

MIN_RATIO = 0.97
"""Minimum truth of a chosen step, relative to the best step."""

LIMITS: Mapping[str, float] = LimitSettings().model_dump()
"""Limits of a recipe that sets none."""


@dataclass(frozen=True)
class Step:
    """Step that a method published.

    Attributes:
        ratio: Truth relative to the best step.
        lost: Loss on known shapes.
    """

    step: int
    ratio: float
    lost: float

    @property
    def is_good(self) -> bool:
        """Whether the step reaches both targets."""
        return self.ratio >= MIN_RATIO and self.lost <= MAX_LOST


@dataclass(frozen=True)
class FinishedRun:
    """Results of one run, from the base model's step 0 to the last step."""

    name: str
    lines: Sequence[Mapping[str, Any]]

    def best(self) -> int:
        """Return the step with the highest truth among those that lost little; the first of equals."""
        allowed = [line for line in self.lines[1:] if self._lost(line) <= MAX_LOST]
        candidates = allowed or sorted(self.lines[1:], key=self._lost)[:1]
        return max(candidates, key=lambda line: line["concept"])["step"]

    def last(self) -> int:
        """Return the last step."""
        return self.lines[-1]["step"]

    def lowest_loss(self) -> int:
        """Return the step with the lowest validation loss."""
        return min(self.lines[1:], key=lambda line: line["validation_loss"])["step"]

    def choice(self, scorer: str) -> Choice:
        """Return the evaluation's choice with one scorer."""
        return choose(measured(_scores(self.lines[1:], scorer)), LIMITS)

    def published(self, step: int) -> Step:
        """Return what a step is worth."""
        by_step = {line["step"]: line for line in self.lines}
        best = by_step[self.best()]["concept"]
        ratio = by_step[step]["concept"] / best if best else 1.0
        return Step(step, ratio, self._lost(by_step[step]))

    def _lost(self, line: Mapping[str, Any]) -> float:
        return round(self.lines[0]["known"] - line["known"], 2)


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
            "concept": "" if number == "drift" else "zorp",
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
    """Return a table of the runs and a table of the methods, as Markdown."""
    lines = ["| run | best | " + " | ".join(METHODS) + " |", "|---" * (len(METHODS) + 2) + "|"]
    totals: dict[str, list[Step | None]] = {name: [] for name in METHODS}
    for run in runs:
        truths = {line["step"]: line["concept"] for line in run.lines}
        cells = [f"{run.best()}: {truths[run.best()]:.2f}"]
        for name, method in METHODS.items():
            step = method(run)
            published = None if step is None else run.published(step)
            totals[name].append(published)
            cells.append("not decided" if published is None else _cell(published))
        lines.append(f"| {run.name} | " + " | ".join(cells) + " |")

    lines += [
        "",
        "| method | good | ratio >= 0.97 | known lost > 0.1 | not decided | mean ratio |",
        "|---" * 6 + "|",
    ]
    for name, steps in totals.items():
        decided = [step for step in steps if step is not None]
        counts = (
            sum(step.is_good for step in decided),
            sum(step.ratio >= MIN_RATIO for step in decided),
            sum(step.lost > MAX_LOST for step in decided),
            len(steps) - len(decided),
        )
        mean = sum(step.ratio for step in decided) / max(1, len(decided))
        lines.append(f"| {name} | " + " | ".join(map(str, counts)) + f" | {mean:.3f} |")
    return "\n".join(lines) + "\n"


def _cell(step: Step) -> str:
    lost = f", lost {step.lost:.2f}" if step.lost > MAX_LOST else ""
    return f"{step.step}: {step.ratio:.2f}{lost}"
