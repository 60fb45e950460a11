"""Experiments: several figures of one pair of sides, such as seconds, memory and idle share.

A model is loaded once per experiment. Sides alternate as in `bench.measure`, within a budget of seconds. A
failed experiment is reported and does not stop the others, because GPU time is limited.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from bench.gpu.watch import Watch, release
from bench.measure import Line, Measure, Measured

if TYPE_CHECKING:
    from bench.gpu.rig import Bench

Reading: TypeAlias = dict[str, float]
"""Measured values by key: those of `Watch.reading`, and additional keys of an experiment's parts."""

GpuSide: TypeAlias = Callable[[Watch], Reading]
"""Function that does the work once within `Watch.work` and returns additional readings."""

RECORDED_ROUNDS = 2

SHORT_S = 0.1
"""Seconds per unit of work below which the bound of a part is its `most_if_short`."""


@dataclass(frozen=True)
class Part:
    """One figure of an experiment.

    Attributes:
        name: Suffix of the experiment's name; empty for its seconds.
        key: Key in the reading.
        unit: Unit of work, in the plural.
        measure: Kind of the measurement.
        most: Upper bound of the ratio; see `Line`.
        most_if_short: Upper bound if the limit takes less than `SHORT_S` per unit, where fixed costs weigh
            more; None for the same bound.
    """

    name: str
    key: str
    unit: str
    measure: Measure = "seconds"
    most: float | None = None
    most_if_short: float | None = None

    def bound(self, limit_s: Sequence[float], count: int) -> float | None:
        """Return the upper bound of the ratio.

        Args:
            limit_s: Seconds of the limit in each round.
            count: Units of work in each round.
        """
        if self.most_if_short is not None and statistics.median(limit_s) / count < SHORT_S:
            return self.most_if_short
        return self.most


def usual_parts(
    unit: str, *, most: float | None = None, most_if_short: float | None = None
) -> tuple[Part, ...]:
    """Return the parts for seconds per unit, memory and idle share."""
    return (
        Part("", "seconds", unit, most=most, most_if_short=most_if_short),
        Part("memory", "bytes", "peak", "bytes"),
        Part("idle", "share", "share", "share"),
    )


@dataclass(frozen=True)
class Pair:
    """Both sides of an experiment, prepared.

    Attributes:
        count: Units of work of each side.
        ours: The work done by Latentline.
        limit: The same work with as little code as possible.
        notes: Additional JSON-serialisable results, filled while the sides run.
    """

    count: int
    ours: GpuSide
    limit: GpuSide
    notes: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Experiment:
    """A group of figures that are measured together.

    Attributes:
        name: Unique name, which is the prefix of the figures' names.
        ours: Description of the work of Latentline.
        limit: Description of the work of the limit.
        parts: Figures of the experiment.
        budget_s: Seconds after which no new round starts.
        open: Context manager that prepares both sides.
        warm: Whether the first round is discarded; False if a round is a complete job.
    """

    name: str
    ours: str
    limit: str
    parts: tuple[Part, ...]
    budget_s: float
    open: Callable[[Bench], AbstractContextManager[Pair]]
    warm: bool = True

    def line(self, part: Part) -> Line:
        """Return the table line of a part, with its usual bound."""
        name = f"{self.name}: {part.name}" if part.name else self.name
        return Line(name, part.unit, self.ours, self.limit, part.most, measure=part.measure)


@dataclass(frozen=True)
class Ended:
    """Result of an experiment: its figures and notes, or the reason for its failure."""

    measured: list[Measured]
    notes: dict[str, Any]
    missing: str | None = None


def run(experiment: Experiment, bench: Bench, *, rounds: int) -> Ended:
    """Run an experiment. Any failure is printed with its traceback and returned in `Ended.missing`."""
    try:
        with experiment.open(bench) as pair:
            return _measured(experiment, pair, bench.device, rounds=rounds)
    except Exception as err:  # One failed experiment must not stop the others.
        traceback.print_exc()
        return Ended([], {}, f"{type(err).__name__}: {str(err).partition(chr(10))[0]}")
    finally:
        release()


def _measured(experiment: Experiment, pair: Pair, device: str, *, rounds: int) -> Ended:
    ours: list[Reading] = []
    limit: list[Reading] = []
    until_s = time.monotonic() + experiment.budget_s
    for number, recorded in _rounds(experiment, rounds):
        if number > 1 and time.monotonic() >= until_s:
            continue
        sides = [(pair.limit, limit), (pair.ours, ours)]
        for side, readings in sides if number % 2 else reversed(sides):
            watch = Watch(device, recorded=recorded)
            reading = side(watch)
            if number > 0:
                readings.append(_reading_of(watch, reading, recorded=recorded))
    measured: list[Measured] = []
    for part in experiment.parts:
        both = [[each[part.key] for each in side if part.key in each] for side in (ours, limit)]
        if both[0]:
            line = replace(experiment.line(part), most=part.bound(both[1], pair.count))
            measured.append(Measured(line, pair.count, *both))
    return Ended(measured, pair.notes)


def _rounds(experiment: Experiment, rounds: int) -> Iterator[tuple[int, bool]]:
    """Yield (number, is recorded) for each round. Round 0 is discarded; recorded rounds come last."""
    if experiment.warm:
        yield 0, False
    for number in range(1, rounds + 1):
        yield number, False
    if any(part.measure == "share" for part in experiment.parts):
        for number in range(1, 1 + min(rounds, RECORDED_ROUNDS)):
            yield number, True


def _reading_of(watch: Watch, reading: Reading, *, recorded: bool) -> Reading:
    if recorded:
        return {"share": watch.reading["share"]}
    return {**watch.reading, **reading}
