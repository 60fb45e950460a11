"""Each stage at several numbers of samples, in turns, and the growth that follows."""

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

COUNTS = (1_000, 3_000, 10_000)
FULL_COUNTS = (1_000, 10_000, 100_000)

MOST_BYTES = 1_000
"""Of memory a sample, that we want to stay below."""

LINEAR = 1.1
"""An exponent up to here is called linear: three points on a shared machine say no more."""


@dataclass(frozen=True)
class Once:
    """One stage, run once: seconds of work, and the peak of its process's memory."""

    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Growth:
    """One stage at several numbers of samples, ascending; `rounds[i]` are those of `counts[i]`."""

    stage: Stage
    counts: tuple[int, ...]
    rounds: tuple[tuple[Once, ...], ...]

    @property
    def seconds(self) -> list[float]:
        """Median of the rounds, for each number of samples."""
        return [statistics.median(once.seconds for once in each) for each in self.rounds]

    @property
    def peak_bytes(self) -> list[float]:
        """Median of the rounds' peaks, for each number of samples."""
        return [statistics.median(once.peak_bytes for once in each) for each in self.rounds]

    @property
    def exponent(self) -> float:
        """Of the seconds from the second largest to the largest number; fixed costs weigh least there."""
        return math.log(self.seconds[-1] / self.seconds[-2]) / math.log(self.counts[-1] / self.counts[-2])

    @property
    def microseconds(self) -> float:
        """A sample, at the largest number."""
        return self.seconds[-1] / self.counts[-1] * 1e6

    @property
    def bytes_a_sample(self) -> float:
        """What the peak of memory gains from the smallest to the largest number, a sample."""
        return (self.peak_bytes[-1] - self.peak_bytes[0]) / (self.counts[-1] - self.counts[0])

    @property
    def excesses(self) -> list[str]:
        """Which of "time", "growth" and "memory" are above what we want."""
        too_slow = self.stage.most_us is not None and self.microseconds > self.stage.most_us
        above = {
            "time": too_slow,
            "growth": self.exponent > LINEAR,
            "memory": self.bytes_a_sample > MOST_BYTES,
        }
        return [name for name, is_above in above.items() if is_above]


def measure(stages: Sequence[Stage], folder: Path, counts: Sequence[int], *, rounds: int) -> list[Growth]:
    """Every stage at every number of samples, `rounds` times; a round goes through all of them.

    Args:
        stages: Some of `STAGES`, in their order.
        folder: Empty; holds a project for each number of samples.
        counts: Numbers of samples, ascending, two at least.
        rounds: At least 1, after one that is thrown away.
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
    """The stage in a fresh process."""
    command = [sys.executable, "-m", "bench.growth.once", stage.name, str(place)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{stage.name} failed:\n{done.stderr}")
    return Once(**json.loads(done.stdout.splitlines()[-1]))


def chosen_stages(names: Sequence[str]) -> list[Stage]:
    """Those whose name, behind "growth: ", begins with one of `names`; all of them when there are none."""
    return [stage for stage in STAGES if not names or f"growth: {stage.name}".startswith(tuple(names))]


def as_json(grown: Sequence[Growth]) -> dict[str, Any]:
    """Everything that was measured and what follows from it, by stage."""
    return {
        each.stage.name: {
            "work": each.stage.work,
            "counts": list(each.counts),
            "seconds": [[round(once.seconds, 6) for once in rounds] for rounds in each.rounds],
            "peak_bytes": [[once.peak_bytes for once in rounds] for rounds in each.rounds],
            "exponent": round(each.exponent, 3),
            "us_a_sample": round(each.microseconds, 3),
            "most_us": each.stage.most_us,
            "bytes_a_sample": round(each.bytes_a_sample),
            "most_bytes": MOST_BYTES,
            "above": each.excesses,
        }
        for each in grown
    }


def table(growth: dict[str, Any]) -> str:
    """The growth as aligned columns; seconds are medians."""
    counts = next(iter(growth.values()))["counts"]
    heads = "".join(f"{f'{count:,}':>11}" for count in counts)
    lines = [f"{'growth':24}{heads} {'exponent':>9} {'a sample':>11} {'at most':>8} {'memory':>12}  above"]
    for name, each in growth.items():
        seconds = "".join(f"{f'{statistics.median(rounds):.3f} s':>11}" for rounds in each["seconds"])
        most = f"{each['most_us']:.0f} us" if each["most_us"] else ""
        time_text, memory = f"{each['us_a_sample']:.1f} us", f"{each['bytes_a_sample']:,} B"
        above = ", ".join(each["above"])
        line = f"{name:24}{seconds} {each['exponent']:>9.2f} {time_text:>11} {most:>8} {memory:>12}  {above}"
        lines.append(line.rstrip())
    return "\n".join(lines)
