"""Results of stages and their report files."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.storage.atomic import write_text

if TYPE_CHECKING:
    import polars as pl

Report: TypeAlias = dict[str, Any]
"""JSON-serialisable report; counters are top-level keys, including `samples`, `seconds` and
`startup_seconds`."""


@dataclass(frozen=True)
class StageResult:
    """Result of one stage: its table, its rows of the rejected table, and its report."""

    table: pl.DataFrame
    rejected: pl.DataFrame
    report: Report


class Stopwatch:
    """Time of a stage, separated into `seconds` of work and `startup_seconds` of child processes.

    Attributes:
        startup_s: Time spent on imports, model loading and process start.
        aside_s: Time spent on pictures, which counts as neither work nor startup.
    """

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self.startup_s = 0.0
        self.aside_s = 0.0

    def numbers(self) -> dict[str, float]:
        """Return `seconds` and `startup_seconds` up to now, rounded to milliseconds."""
        total_s = time.perf_counter() - self._start_s
        return {
            "seconds": round(max(0.0, total_s - self.startup_s - self.aside_s), 3),
            "startup_seconds": round(self.startup_s, 3),
        }


def report_path(output_dir: Path, asset: str) -> Path:
    """Return `output_dir/reports/<asset>.json`."""
    return output_dir / "reports" / f"{asset}.json"


def read_report(output_dir: Path, asset: str) -> Report | None:
    """Return the report of an asset's last materialization; None if it is missing or damaged."""
    try:
        report = json.loads(report_path(output_dir, asset).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) else None


def write_report(output_dir: Path, asset: str, report: Mapping[str, Any]) -> Path:
    """Replace the report file of an asset atomically, with sorted keys, and return its path."""
    path = report_path(output_dir, asset)
    write_text(path, json.dumps(report, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    return path
