"""What a stage hands back, and its report file for machines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.storage.atomic import write_text

if TYPE_CHECKING:
    import polars as pl

Log: TypeAlias = Callable[[str], None]
"""Takes one line of progress or a warning, without a trailing newline."""

Report: TypeAlias = dict[str, Any]
"""JSON-serialisable; counters are top-level keys, among them `samples`, `seconds` and `startup_seconds`."""


@dataclass(frozen=True)
class StageResult:
    """What one stage made of its inputs.

    Attributes:
        table: One row a kept sample, in the schema of the stage's table.
        rejected: One row a rejected sample, in `tables.REJECTED`; only this stage's rows.
        report: Counters and facts of this materialization.
    """

    table: pl.DataFrame
    rejected: pl.DataFrame
    report: Report


class Stopwatch:
    """Measures a stage's `seconds` of work, and apart from it the `startup_seconds` of child processes.

    `startup_seconds` is what is spent on imports, model loading and process start; `seconds` is the rest of
    the time since construction, but for `aside_s`: what was spent on pictures for people to look at.
    """

    def __init__(self) -> None:
        """Start now."""
        self._start_s = time.perf_counter()
        self.startup_s = 0.0
        self.aside_s = 0.0

    def numbers(self) -> dict[str, float]:
        """`seconds` and `startup_seconds` up to now, rounded to milliseconds."""
        total_s = time.perf_counter() - self._start_s
        return {
            "seconds": round(max(0.0, total_s - self.startup_s - self.aside_s), 3),
            "startup_seconds": round(self.startup_s, 3),
        }


def report_path(output_dir: Path, asset: str) -> Path:
    """`output_dir/reports/<asset>.json`."""
    return output_dir / "reports" / f"{asset}.json"


def read_report(output_dir: Path, asset: str) -> Report | None:
    """The asset's report of its last materialization; None when there is none or it is damaged."""
    try:
        report = json.loads(report_path(output_dir, asset).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) else None


def write_report(output_dir: Path, asset: str, report: Mapping[str, Any]) -> Path:
    """Replace the asset's report file atomically; keys are sorted.

    Returns:
        The file's path.
    """
    path = report_path(output_dir, asset)
    write_text(path, json.dumps(report, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    return path
