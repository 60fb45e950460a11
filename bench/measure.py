"""Ours against a limit, in turns within one run, so that a noisy machine is noisy for both.

A figure's two sides do the same work: `ours` as Latentline does it, `limit` as barely as it can be done here.
Each side returns its own seconds, because what it prepares must not count.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Measure = Literal["seconds", "bytes", "share"]
"""Of what a side's answer is: time; memory at its peak; a share of the time, from 0 to 1."""

Side = Callable[[], float]
"""Does the work once and returns the seconds that it took."""


@dataclass(frozen=True)
class Sides:
    """What is measured, prepared: `count` units of work on each side."""

    count: int
    ours: Side
    limit: Side


@dataclass(frozen=True)
class Workplace:
    """Where a figure prepares its files, and how much of everything.

    Attributes:
        folder: Empty, its own, removed afterwards.
        full: True for the sizes that documents quote; otherwise those of a few minutes.
    """

    folder: Path
    full: bool


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        name: Short, unique, stable: runs are compared by it.
        unit: What is counted, in the plural.
        ours: What our side does.
        limit: What the limit does.
        most: The ratio that we want to stay below; None where only the number is of interest.
        measure: What is measured.
    """

    name: str
    unit: str
    ours: str
    limit: str
    most: float | None
    measure: Measure = field(default="seconds", kw_only=True)


@dataclass(frozen=True)
class Figure(Line):
    """A line that is measured by itself.

    Attributes:
        open: Prepares both sides.
    """

    open: Callable[[Workplace], AbstractContextManager[Sides]]


@dataclass(frozen=True)
class Measured:
    """What each round measured, in order; round i of both sides ran right after one another."""

    figure: Line
    count: int
    ours: list[float]
    limit: list[float]

    @property
    def ratios(self) -> list[float]:
        """Ours divided by the limit, a round each; 1 where both are nothing."""
        return [_ratio(ours, limit) for ours, limit in zip(self.ours, self.limit, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios."""
        return statistics.median(self.ratios)


def _ratio(ours: float, limit: float) -> float:
    return ours / limit if limit else (1.0 if not ours else math.inf)


def timed(work: Callable[[], object]) -> Side:
    """A side that is measured from outside, with the garbage collector's debts paid before."""

    def side() -> float:
        gc.collect()
        start_s = time.perf_counter()
        work()
        return time.perf_counter() - start_s

    return side


def measure(figure: Figure, place: Workplace, *, rounds: int) -> Measured:
    """Both sides in turns, after one round that is thrown away; who goes first changes each round."""
    with figure.open(place) as sides:
        ours_s: list[float] = []
        limit_s: list[float] = []
        for number in range(-1, rounds):
            pair = [(sides.limit, limit_s), (sides.ours, ours_s)]
            for side, seconds in pair if number % 2 else reversed(pair):
                taken_s = side()
                if number >= 0:
                    seconds.append(taken_s)
        return Measured(figure, sides.count, ours_s, limit_s)


def spread(seconds: list[float]) -> Iterator[float]:
    """Smallest, median, largest."""
    yield from (min(seconds), statistics.median(seconds), max(seconds))
