"""Parts that the checks on masks and on reference images share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.checks.findings import CheckContext, Outcome
from pipeline.checks.rejections import REJECTED_COLUMNS, most_frequent_first, most_frequent_fixes
from pipeline.errors import counted

if TYPE_CHECKING:
    import polars as pl

_STAGE = "validated_dataset"


def rejected_outcome(summary: str, rejected: pl.DataFrame) -> Outcome:
    """Return the failure of a check that rejected these samples; its summary ends with the first of them."""
    rows = most_frequent_first(rejected).select(REJECTED_COLUMNS).rows(named=True)
    summary += f"; {rows[0]['sample_id']}: {rows[0]['detail']}"
    return Outcome(False, summary, most_frequent_fixes(rejected), rows)


def matched_outcome(context: CheckContext, noun: str) -> Outcome:
    """Return whether every file belongs to an image.

    Args:
        context: The checked recipe and its reports.
        noun: Name of one such file; the key of the report has its plural with "s".
    """
    report, key = context.report(_STAGE) or {}, f"unmatched_{noun}s"
    number, paths = report.get(key, 0), report.get("named", {}).get(key, [])
    if not number:
        return Outcome(True, f"each {noun} belongs to an image")
    files = counted(number, f"{noun} belongs", f"{noun}s belong")
    fix = f"rename the {noun}s like their images, or remove them"
    rows = [{noun: path} for path in paths]
    return Outcome(False, f"{files} to no image, first {paths[0]}", fix, rows, {key: number})
