"""Measure Latentline and a limit in alternation, so that a noisy machine affects both.

The two sides of a figure do the same work: `ours` with Latentline, `limit` with as little code as possible.
Each side returns its own seconds, which exclude preparation.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

Measure = Literal["seconds", "bytes", "share"]
"""Kind of a measurement: seconds, peak memory in bytes, or a share of the time in [0, 1]."""

Side = Callable[[], float]
"""Function that does the work once and returns its seconds."""


@dataclass(frozen=True)
class Sides:
    """Both sides of a figure, prepared. Each does `count` units of work."""

    count: int
    ours: Side
    limit: Side


@dataclass(frozen=True)
class Workplace:
    """Folder and size of a figure.

    Attributes:
        folder: Empty folder that is removed afterwards.
        full: True for the sizes in docs/benchmarks.md, False for sizes that take a few minutes.
    """

    folder: Path
    full: bool


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        name: Short, unique and stable name, by which runs are compared.
        unit: Unit of work, in the plural.
        ours: Description of the work of Latentline.
        limit: Description of the work of the limit.
        most: Upper bound of the ratio, or None without a bound.
        measure: Kind of the measurement.
    """

    name: str
    unit: str
    ours: str
    limit: str
    most: float | None
    measure: Measure = field(default="seconds", kw_only=True)


@dataclass(frozen=True)
class Figure(Line):
    """A line with its own measurement.

    Attributes:
        open: Context manager that prepares both sides.
    """

    open: Callable[[Workplace], AbstractContextManager[Sides]]


@dataclass(frozen=True)
class Measured:
    """Measurements of each round, in order. Round i of both sides ran directly after each other."""

    figure: Line
    count: int
    ours: list[float]
    limit: list[float]

    @property
    def ratios(self) -> list[float]:
        """Ours divided by the limit for each round; 1 if both are zero."""
        return [_ratio(ours, limit) for ours, limit in zip(self.ours, self.limit, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios."""
        return statistics.median(self.ratios)


def _ratio(ours: float, limit: float) -> float:
    return ours / limit if limit else (1.0 if not ours else math.inf)


def timed(work: Callable[[], object]) -> Side:
    """Return a side that times `work`, after a garbage collection."""

    def side() -> float:
        gc.collect()
        start_s = time.perf_counter()
        work()
        return time.perf_counter() - start_s

    return side


@contextmanager
def side_in_process(
    open_side: Callable[[Path], AbstractContextManager[Side]], file: Path, variables: Mapping[str, str]
) -> Generator[Side]:
    """Provide the side that `open_side` prepares from `file`, in a process with these environment variables.

    OpenMP reads its variables once per process, so two settings cannot be compared within one.
    """
    context = get_context("spawn")
    connection, other_end = context.Pipe()
    process = context.Process(target=_serve, args=(open_side, file, other_end), daemon=True)

    # A new process has the environment of this one at its start.
    own = dict(os.environ)
    os.environ.update(variables)
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(own)
    other_end.close()  # so that the end of the process is an EOFError here, and not an endless wait
    connection.recv()

    def side() -> float:
        connection.send(None)
        return connection.recv()

    yield side
    connection.close()
    process.join()


def _serve(
    open_side: Callable[[Path], AbstractContextManager[Side]], file: Path, connection: Connection
) -> None:
    with open_side(file) as side:
        connection.send("ready")
        while True:
            try:
                connection.recv()
            except EOFError:
                return
            connection.send(side())


def measure(figure: Figure, place: Workplace, *, rounds: int) -> Measured:
    """Measure both sides in alternation, after one discarded round. The first side changes each round."""
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
    """Yield the smallest, median and largest value."""
    yield from (min(seconds), statistics.median(seconds), max(seconds))
