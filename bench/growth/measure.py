"""Measure time and memory of each stage at several numbers of samples, in alternation."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.growth.stages import STAGES, Stage, prepare

COUNTS = (1_000, 10_000, 30_000)
FULL_COUNTS = (1_000, 10_000, 100_000)

MOST_BYTES = 3_000
"""Maximum memory per sample, in bytes."""

LINEAR = 1.1
"""Largest exponent that counts as linear. Three points on a shared machine allow no tighter bound."""


@dataclass(frozen=True)
class Once:
    """One run of a stage: seconds of work, and peak memory of its process before the work and with it."""

    seconds: float
    base_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Growth:
    """One stage at several numbers of samples in ascending order; `rounds[i]` belongs to `counts[i]`."""

    stage: Stage
    counts: tuple[int, ...]
    rounds: tuple[tuple[Once, ...], ...]

    @property
    def seconds(self) -> list[float]:
        """Median seconds for each number of samples."""
        return [statistics.median(once.seconds for once in each) for each in self.rounds]

    @property
    def peak_bytes(self) -> list[float]:
        """Median peak memory for each number of samples."""
        return [statistics.median(once.peak_bytes for once in each) for each in self.rounds]

    @property
    def exponent(self) -> float:
        """Exponent of the seconds between the two largest numbers, where fixed costs matter least."""
        return math.log(self.seconds[-1] / self.seconds[-2]) / math.log(self.counts[-1] / self.counts[-2])

    @property
    def us_a_sample(self) -> float:
        """Microseconds added per sample between the two largest numbers."""
        return self._slope(self.seconds) * 1e6

    @property
    def us_in_all(self) -> float:
        """Microseconds per sample at the largest number, including fixed costs."""
        return self.seconds[-1] / self.counts[-1] * 1e6

    @property
    def bytes_a_sample(self) -> float:
        """Peak memory added per sample between the two largest numbers, in bytes."""
        return self._slope(self.peak_bytes)

    @property
    def bytes_in_all(self) -> float:
        """Memory per sample at the largest number, including fixed costs, in bytes."""
        added = [once.peak_bytes - once.base_bytes for once in self.rounds[-1]]
        return statistics.median(added) / self.counts[-1]

    def _slope(self, values: Sequence[float]) -> float:
        return (values[-1] - values[-2]) / (self.counts[-1] - self.counts[-2])

    @property
    def excesses(self) -> list[str]:
        """Those of "time", "growth" and "memory" that exceed their bound."""
        too_slow = self.stage.most_us is not None and self.us_a_sample > self.stage.most_us
        above = {
            "time": too_slow,
            "growth": self.exponent > LINEAR,
            "memory": self.bytes_a_sample > MOST_BYTES,
        }
        return [name for name, is_above in above.items() if is_above]


def measure(stages: Sequence[Stage], folder: Path, counts: Sequence[int], *, rounds: int) -> list[Growth]:
    """Measure every stage at every number of samples, in `rounds` alternating rounds.

    Args:
        stages: Some of `STAGES`, in their order.
        folder: Empty folder for the projects.
        counts: At least two numbers of samples, ascending.
        rounds: Number of rounds, at least 1, after a discarded one.
    """
    places = {count: folder / str(count) for count in counts}
    print(f"growth: preparing {', '.join(f'{count:,}' for count in counts)} samples", flush=True)
    prepare({place: count for count, place in places.items()})
    taken: dict[tuple[str, int], list[Once]] = {
        (stage.name, count): [] for stage in stages for count in counts
    }
    for number in range(-1, rounds):
        for stage in stages:
            print(f"growth: round {number + 1} of {rounds}, {stage.name}", flush=True)
            for count, place in places.items():
                once = run_once(stage, place)
                if number >= 0:
                    taken[stage.name, count].append(once)
    return [
        Growth(stage, tuple(counts), tuple(tuple(taken[stage.name, count]) for count in counts))
        for stage in stages
    ]


def run_once(stage: Stage, place: Path) -> Once:
    """Run a stage once in a new process."""
    command = [sys.executable, "-m", "bench.growth.once", stage.name, str(place)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{stage.name} failed:\n{done.stderr}")
    return Once(**json.loads(done.stdout.splitlines()[-1]))


def chosen_stages(names: Sequence[str]) -> list[Stage]:
    """Return the stages whose name after "growth: " starts with one of `names`; all without names."""
    return [stage for stage in STAGES if not names or f"growth: {stage.name}".startswith(tuple(names))]


def as_json(grown: Sequence[Growth]) -> dict[str, Any]:
    """Return the measurements by stage; `table` derives the rest from them."""
    return {
        each.stage.name: {
            "work": each.stage.work,
            "counts": list(each.counts),
            "seconds": [[round(once.seconds, 6) for once in rounds] for rounds in each.rounds],
            "base_bytes": [[once.base_bytes for once in rounds] for rounds in each.rounds],
            "peak_bytes": [[once.peak_bytes for once in rounds] for rounds in each.rounds],
            "most_us": each.stage.most_us,
        }
        for each in grown
    }


def from_json(growth: dict[str, Any]) -> list[Growth]:
    """Return the measurements of `as_json`; their stages cannot run."""
    return [_grown(name, each) for name, each in growth.items()]


def _grown(name: str, each: dict[str, Any]) -> Growth:
    columns = zip(each["seconds"], each["base_bytes"], each["peak_bytes"], strict=True)
    rounds = [tuple(map(Once, *of_count)) for of_count in columns]
    stage = Stage(name, each["work"], each["most_us"], lambda project: None)
    return Growth(stage, tuple(each["counts"]), tuple(rounds))


def table(growth: dict[str, Any]) -> str:
    """Return the measurements of `as_json` as aligned columns; seconds are medians."""
    grown = from_json(growth)
    heads = "".join(f"{f'{count:,}':>11}" for count in grown[0].counts)
    lines = [
        f"{'growth':22}{heads} {'exponent':>9} {'time/sample':>12} {'total':>10} {'at most':>8} "
        f"{'memory/sample':>14} {'total':>9} {'at most':>8}  above"
    ]
    for each in grown:
        seconds = "".join(f"{f'{median:.3f} s':>11}" for median in each.seconds)
        most_us = f"{each.stage.most_us:.0f} us" if each.stage.most_us else ""
        times = f"{f'{each.us_a_sample:.1f} us':>12} {f'{each.us_in_all:.1f} us':>10} {most_us:>8}"
        in_all = f"{each.bytes_in_all:,.0f} B"
        memory = f"{f'{each.bytes_a_sample:,.0f} B':>14} {in_all:>9} {f'{MOST_BYTES:,} B':>8}"
        above = ", ".join(each.excesses)
        line = f"{each.stage.name:22}{seconds} {each.exponent:>9.2f} {times} {memory}  {above}"
        lines.append(line.rstrip())
    return "\n".join(lines)
