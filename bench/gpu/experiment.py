"""Several figures of one pair of sides: a model is loaded once, and seconds, memory and idle share are read.

Sides run in turns as in `bench.measure`, within a budget of seconds. What fails is said and left out: on a
machine that is lent by the minute, one experiment's failure must not cost the others' numbers.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from bench.gpu.watch import Watch, release
from bench.measure import Line, Measure, Measured

if TYPE_CHECKING:
    from bench.gpu.rig import Bench

Reading: TypeAlias = dict[str, float]
"""What to its value; `Watch.reading`'s names, and a part's own."""

GpuSide: TypeAlias = Callable[[Watch], Reading]
"""Does the work once inside of `Watch.work`, and returns what is read beside the watch's own reading."""

RECORDED_ROUNDS = 2


@dataclass(frozen=True)
class Part:
    """One figure of an experiment.

    Attributes:
        name: Added to the experiment's; empty for its seconds.
        key: In the reading.
        unit: What is counted, in the plural.
        measure: What is measured.
        most: As `Figure.most`.
    """

    name: str
    key: str
    unit: str
    measure: Measure = "seconds"
    most: float | None = None


def usual_parts(unit: str, *, most: float | None = None) -> tuple[Part, ...]:
    """Seconds of each unit, memory and idle share."""
    return (
        Part("", "seconds", unit, most=most),
        Part("memory", "bytes", "peak", "bytes"),
        Part("idle", "share", "share", "share"),
    )


@dataclass(frozen=True)
class Pair:
    """Both sides, prepared.

    Attributes:
        count: Units of work on each side.
        ours: As Latentline does it.
        limit: As barely as it can be done.
        notes: What else is worth keeping, JSON-serialisable; filled while the sides run.
    """

    count: int
    ours: GpuSide
    limit: GpuSide
    notes: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Experiment:
    """Figures that are measured together.

    Attributes:
        name: As a figure's; the figures' names begin with it.
        ours: What our side does.
        limit: What the limit does.
        parts: The figures.
        budget_s: No round begins after so many seconds.
        open: Prepares both sides.
        warm: Whether a first round is thrown away; False where a round is a whole job.
    """

    name: str
    ours: str
    limit: str
    parts: tuple[Part, ...]
    budget_s: float
    open: Callable[[Bench], AbstractContextManager[Pair]]
    warm: bool = True

    def line(self, part: Part) -> Line:
        """As `bench.results` keeps it."""
        name = f"{self.name}: {part.name}" if part.name else self.name
        return Line(name, part.unit, self.ours, self.limit, part.most, measure=part.measure)


@dataclass(frozen=True)
class Ended:
    """What came of an experiment: its figures and notes, or why there are none."""

    measured: list[Measured]
    notes: dict[str, Any]
    missing: str | None = None


def run(experiment: Experiment, bench: Bench, *, rounds: int) -> Ended:
    """Measure it; what fails, for whatever reason, is told in `Ended.missing`, and printed whole."""
    try:
        with experiment.open(bench) as pair:
            return _measured(experiment, pair, bench.device, rounds=rounds)
    except Exception as err:  # the others' numbers are not to be lost
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
                readings.append(_seen(watch, reading, recorded=recorded))
    measured: list[Measured] = []
    for part in experiment.parts:
        both = [[each[part.key] for each in side if part.key in each] for side in (ours, limit)]
        if both[0]:
            measured.append(Measured(experiment.line(part), pair.count, *both))
    return Ended(measured, pair.notes)


def _rounds(experiment: Experiment, rounds: int) -> Iterator[tuple[int, bool]]:
    """(number, whether it is recorded) of each round: 0 is thrown away, and the idle share comes last."""
    if experiment.warm:
        yield 0, False
    for number in range(1, rounds + 1):
        yield number, False
    if any(part.measure == "share" for part in experiment.parts):
        for number in range(1, 1 + min(rounds, RECORDED_ROUNDS)):
            yield number, True


def _seen(watch: Watch, reading: Reading, *, recorded: bool) -> Reading:
    if recorded:
        return {"share": watch.reading["share"]}
    return {**watch.reading, **reading}
