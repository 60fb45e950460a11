"""The table of a race in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

BARE = "bare process"


def table(peers: dict[str, Any]) -> list[str]:
    """Return the lines: medians of the rounds, and the median ratio to the bare process in the same round."""
    trainers: dict[str, Any] = peers["trainers"]
    bare = trainers[BARE]
    columns = ["trainer"]
    for title in (
        "empty caches, first step",
        f"step {peers['steps']}",
        "full caches, first step",
        f"of {peers['cached']:,} images",
        "step",
    ):
        columns += [title, "ratio"]
    columns += ["memory, empty", "full", f"{peers['cached']:,}"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [_row(name, entry, bare) for name, entry in trainers.items()]
    notes = [f"- {name}: {entry['note']}." for name, entry in trainers.items() if entry["note"]]
    for name, entry in trainers.items():
        if "failed" in entry:
            notes += ["", f"{name} failed:", "", "```", entry["failed"], "```"]
    return [*lines, "", *notes]


def _row(name: str, entry: dict[str, Any], bare: dict[str, Any]) -> str:
    title = f"{name} {entry['version']}"
    if "failed" in entry:
        return f"| {title} | failed |" + " |" * 12
    timed: list[tuple[Callable[[dict[str, Any]], list[float]], str]] = [
        (lambda each: _values(each["cold"], "first_s"), "{:.1f} s"),
        (lambda each: _values(each["cold"], "last_s"), "{:.1f} s"),
        (lambda each: _values(each["warm"], "first_s"), "{:.1f} s"),
        (lambda each: _values(each["cached"], "first_s"), "{:.1f} s"),
        (lambda each: _values(each["warm"], "step_s"), "{:.3f} s"),
    ]
    cells = list[str]()
    for values, form in timed:
        cells += [form.format(statistics.median(values(entry))), _ratio(values(entry), values(bare))]
    for caches in ("cold", "warm", "cached"):
        cells.append(f"{statistics.median(_values(entry[caches], 'peak_bytes')) / 1e9:.2f} GB")
    return f"| {title} | {' | '.join(cells)} |"


def _values(runs: Sequence[dict[str, float]], key: str) -> list[float]:
    return [run[key] for run in runs]


def _ratio(values: list[float], limits: list[float]) -> str:
    if len(values) != len(limits):
        return ""  # the bare process failed
    ratios = [value / limit for value, limit in zip(values, limits, strict=True)]
    return f"{statistics.median(ratios):.2f}"
