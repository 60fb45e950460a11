"""Results of stages and their report files."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.escaping import finite_json
from pipeline.storage.atomic import write_text
from pipeline.storage.regular_files import file_sha256

if TYPE_CHECKING:
    import polars as pl

Report: TypeAlias = dict[str, Any]
"""JSON-serialisable report; counters are top-level keys, including `samples`, `seconds` and
`startup_seconds`."""

_MADE_FOR_FILE = "made_for.txt"
"""File in a report's folder: digests of what it shows, then the hash and the name of each file."""


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
        waited_s: Time before child processes started, such as the wait for a place in a pool, which counts as
            neither work nor startup.
    """

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self.startup_s = 0.0
        self.aside_s = 0.0
        self.waited_s = 0.0

    def numbers(self) -> dict[str, float]:
        """Return `seconds` and `startup_seconds` up to now, rounded to milliseconds."""
        total_s = time.perf_counter() - self._start_s
        return {
            "seconds": round(max(0.0, total_s - self.startup_s - self.aside_s - self.waited_s), 3),
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
    """Replace the report file of an asset atomically, with sorted keys, and return its path.

    A number that is not finite, such as the loss of a training that diverged, is null.
    """
    path = report_path(output_dir, asset)
    text = json.dumps(finite_json(report), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_text(path, f"{text}\n")
    return path


def is_current(folder: Path, *digests: str) -> bool:
    """Return whether `mark_current` recorded these digests first, and the folder's files are unchanged since.

    Deletes files that have changed, so that they are written again. Reports of 0.3.0 have no hashes.
    """
    try:
        recorded, *files = (folder / _MADE_FOR_FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return False

    hashes = {name: sha256 for sha256, _, name in (line.partition(" ") for line in files)}
    # Of the files that exist, because a damaged record may name any file.
    current = {name: file_sha256(folder / name) for name in _names(folder)}
    for name in current.keys() & hashes.keys():
        if current[name] != hashes[name]:
            (folder / name).unlink()
    return (not files or current == hashes) and recorded.split()[: len(digests)] == [*digests]


def mark_current(folder: Path, *digests: str) -> None:
    """Record what the files in the folder, which are complete, were made for, and their hashes."""
    lines = [f"{file_sha256(folder / name)} {name}" for name in _names(folder)]
    write_text(folder / _MADE_FOR_FILE, "\n".join([" ".join(digests), *lines]) + "\n")


def _names(folder: Path) -> list[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != _MADE_FOR_FILE)


def forget_current(folder: Path) -> None:
    """Remove the record before the files are written, so that an interruption leaves none."""
    (folder / _MADE_FOR_FILE).unlink(missing_ok=True)
