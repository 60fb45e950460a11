"""A run's numbers as JSON, as a table on the terminal, and beside those of an earlier run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.measure import Measure, Measured, spread

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "dagster", "pillow", "polars", "safetensors")

SUFFIXES: dict[Measure, str] = {"seconds": "s", "bytes": "bytes", "share": "share"}
"""Of the keys `ours_` and `limit_` of a figure, by what is measured."""

SLOWER = 1.10
"""A median ratio that grew by more than this, beyond both runs' spread, counts as slower."""


@dataclass(frozen=True)
class Change:
    """One figure in two runs; a ratio is ours divided by the limit."""

    name: str
    before: float
    after: float
    slower: bool


def as_json(measured: list[Measured], *, full: bool) -> dict[str, Any]:
    """Everything that was measured, and on what."""
    return {
        "machine": machine(),
        "commit": commit(),
        "full": full,
        "figures": {each.figure.name: _figure(each) for each in measured},
    }


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory, GPU, and versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": _gpu(),
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": _versions(),
    }


def _versions() -> dict[str, str]:
    """Of those packages that are there: training and caching need no Dagster."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def commit() -> str:
    """The commit that was measured, with a plus where the working tree differs from it.

    `BENCH_COMMIT` names it where a copy without its history is measured, on a machine that is lent.
    """
    if named := os.environ.get("BENCH_COMMIT"):
        return named
    root = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")


def table(run: dict[str, Any]) -> str:
    """The run as aligned columns: per unit, ours and the limit; then the ratio and its spread."""
    lines = [
        f"{'figure':34} {'count':>8} {'ours':>12} {'limit':>12} {'ratio':>7}  {'spread':13} {'at most':>7}"
    ]
    for name, figure in run["figures"].items():
        low, ratio, high = figure["ratio"]
        most = f"{figure['most']:.2f}" if figure["most"] else ""
        each = f"{_shown(figure, 'ours'):>12} {_shown(figure, 'limit'):>12}"
        spread_text = f"{low:.2f}-{high:.2f}"
        lines.append(f"{name:34} {figure['count']:>8,} {each} {ratio:>7.2f}  {spread_text:13} {most:>7}")
    return "\n".join(lines)


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """The figures that both runs have, by name.

    Slower is what got worse by more than a tenth at the median and lies above all that the earlier run saw.
    """
    changes = list[Change]()
    for name, new in after["figures"].items():
        old = before["figures"].get(name)
        if old is None:
            continue
        was, now = old["ratio"], new["ratio"]
        changes.append(Change(name, was[1], now[1], now[1] > SLOWER * was[1] and now[1] > was[2]))
    return changes


def save(run: dict[str, Any], path: Path) -> None:
    """Write the run, keys in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    """A run that `save` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def _figure(each: Measured) -> dict[str, Any]:
    figure, suffix = each.figure, SUFFIXES[each.figure.measure]
    return {
        "unit": figure.unit,
        "count": each.count,
        "ours": figure.ours,
        "limit": figure.limit,
        "most": figure.most,
        "measure": figure.measure,
        f"ours_{suffix}": [round(value, 6) for value in each.ours],
        f"limit_{suffix}": [round(value, 6) for value in each.limit],
        "ratio": [round(ratio, 4) for ratio in spread(each.ratios)],
    }


def _shown(figure: dict[str, Any], side: str) -> str:
    """The median: seconds of one unit, or what is measured of all."""
    measure: Measure = figure.get("measure", "seconds")
    _, value, _ = spread(figure[f"{side}_{SUFFIXES[measure]}"])
    if measure == "bytes":
        return f"{value / 2**30:.3g} GiB"
    return f"{value:.1%}" if measure == "share" else _duration(value / figure["count"])


def _duration(each: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if each >= size:
            return f"{each / size:.3g} {unit}"
    return f"{each / 1e-9:.3g} ns"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
