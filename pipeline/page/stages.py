"""The stages of a recipe on its page: counts, gates and warnings of their last materialization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import counted
from pipeline.recipe.check_specs import ALL_SPECS
from pipeline.reporting.reports import Report, read_report
from pipeline.storage.tables import OPTIONAL_ASSETS

if TYPE_CHECKING:
    from pathlib import Path

MAX_NAMED_ROWS = 5
"""Maximum number of rows shown of a check that did not pass."""


@dataclass(frozen=True)
class Stage:
    """One stage of the recipe.

    Attributes:
        state: Result in two or three words, such as "2 gates closed".
        kind: Colour of the state: "none", "good", "warning" or "bad".
        counts: What the stage has done.
        seconds: Time of its work; None if it has not run.
        gates: Number of gates that passed and of all gates, such as "6 of 7"; empty if it has not run.
        failed: Checks that did not pass, with summary, fix, the first rows and the number of rows.
    """

    name: str
    state: str
    kind: str
    counts: str = ""
    seconds: float | None = None
    gates: str = ""
    failed: tuple[dict[str, Any], ...] = ()


def read_stages(output_dir: Path) -> list[Stage]:
    """Return the stages in the order of the graph; optional ones only if they have run."""
    stages = [_read_stage(output_dir, asset) for asset in ALL_SPECS]
    return [each for each in stages if each.kind != "none" or each.name not in OPTIONAL_ASSETS]


def _read_stage(output_dir: Path, asset: str) -> Stage:
    report = read_report(output_dir, asset)
    checks = read_report(output_dir, f"{asset}_checks")
    if report is None and checks is None:
        return Stage(asset, "not yet run", "none")

    # A gate that closes before its stage, such as an overlap of folders, leaves no report.
    report, checks = report or {}, checks or {}
    passed, closed = int(checks.get("gates_passed", 0)), int(checks.get("gates_closed", 0))
    warnings = int(checks.get("warnings", 0))
    state, kind = ("passed", "good") if checks else ("checks have not run", "none")
    if warnings:
        state, kind = counted(warnings, "warning"), "warning"
    if closed:
        state, kind = f"{counted(closed, 'gate')} closed", "bad"
    num_gates = sum(each.get("gate", False) for each in checks.get("checks", []))
    return Stage(
        asset,
        state,
        kind,
        _counts(asset, report),
        report.get("seconds"),
        f"{passed} of {num_gates}" if num_gates else "",
        tuple(_failed(each) for each in checks.get("checks", []) if not each.get("passed")),
    )


def _failed(check: dict[str, Any]) -> dict[str, Any]:
    rows = check.get("rows", [])
    lines = [", ".join(str(value) for value in row.values() if value not in (None, "")) for row in rows]
    num_rows = check.get("numbers", {}).get("num_rows", len(rows))
    return {**check, "lines": lines[:MAX_NAMED_ROWS], "more": num_rows - len(lines[:MAX_NAMED_ROWS])}


def _counts(asset: str, report: Report) -> str:
    parts = [
        f"{report[name]:,} {text}"
        for name, text in (
            ("in", "images in"),
            ("kept", "kept"),
            ("rejected", "rejected"),
            ("encoded", "encoded"),
            ("reused", "reused"),
            ("failed", "failed"),
        )
        # Most stages reject and fail nothing.
        if isinstance(report.get(name), int) and (report[name] or name not in ("rejected", "failed"))
    ]
    if report.get("num_buckets"):
        parts.append(counted(report["num_buckets"], "bucket"))
    if asset == "trained_lora" and report.get("steps"):
        parts = [counted(int(report["steps"]), "step")]
        parts += ["finished before and unchanged"] if not report.get("launched", True) else []
    if asset in OPTIONAL_ASSETS and report.get("why"):
        parts = [str(report["why"])]
    return ", ".join(parts)
