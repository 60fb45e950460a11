"""Results of a run: stored as JSON, printed as a table, and compared with an earlier run."""

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
"""Suffixes of a figure's `ours_` and `limit_` keys, by kind of measurement."""

SLOWER = 1.10
"""Factor above which a larger median ratio counts as slower, if it also exceeds every earlier ratio."""


@dataclass(frozen=True)
class Change:
    """Median ratios of one figure in two runs."""

    name: str
    before: float
    after: float
    slower: bool


def as_json(measured: list[Measured], *, full: bool) -> dict[str, Any]:
    """Return all measurements with the machine and commit."""
    return {
        "machine": machine(),
        "commit": commit(),
        "full": full,
        "figures": {each.figure.name: _figure(each) for each in measured},
    }


def machine() -> dict[str, Any]:
    """Return the processor, usable cores, memory, GPU and versions."""
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
    """Return the versions of the installed packages; Dagster may be missing."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def commit() -> str:
    """Return the measured commit, followed by "+" if the working tree has changes.

    `BENCH_COMMIT` overrides it, for copies without a Git history.
    """
    if named := os.environ.get("BENCH_COMMIT"):
        return named
    root = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        completed = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return completed.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")


def table(run: dict[str, Any]) -> str:
    """Return the run as aligned columns: ours and the limit per unit, the ratio, and its spread."""
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
    """Return the changes of the figures that both runs contain.

    A figure is slower if its median ratio exceeds `SLOWER` times the earlier median and every earlier ratio.
    """
    changes = list[Change]()
    for name, new in after["figures"].items():
        old = before["figures"].get(name)
        if old is None:
            continue
        before_ratio, after_ratio = old["ratio"], new["ratio"]
        slower = after_ratio[1] > SLOWER * before_ratio[1] and after_ratio[1] > before_ratio[2]
        changes.append(Change(name, before_ratio[1], after_ratio[1], slower))
    return changes


def save(run: dict[str, Any], path: Path) -> None:
    """Write the run as JSON with sorted keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    """Return a run that `save` wrote."""
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
    """Return the median as text: time per unit, or total memory, or share."""
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
