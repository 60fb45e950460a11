"""What to do about rejected samples: the most frequent reasons first, each with its count and its fix."""

from __future__ import annotations

import polars as pl

from pipeline.checks.findings import Outcome
from pipeline.errors import counted

MAX_FIXES = 3
"""Reasons that are told: the three most useful things to do."""

SHOWN = ("sample_id", "reason", "detail", "fix")
"""Of a rejected row, what a finding shows."""


def fixes(rejected: pl.DataFrame, *, otherwise: str = "") -> str:
    """A line for each of the most frequent reasons: how many, why, the first such sample, and the fix.

    Of the fixes that samples of one reason have the most frequent one is told; ties go to the first by name.

    Args:
        rejected: At least one row, in `tables.REJECTED`.
        otherwise: A last line: what can be done instead of all that.
    """
    same = rejected.group_by("reason", "fix").agg(number=pl.len())
    usual = same.sort("number", "fix", descending=[True, False]).unique("reason", maintain_order=True)
    counts = rejected.group_by("reason").agg(count=pl.len(), first=pl.col("sample_id").min())
    told = counts.join(usual, on="reason").sort("count", "reason", descending=[True, False])
    lines = [
        f"{count:,} {reason.replace('_', ' ')}, the first is {first}: {fix}"
        for reason, count, first, fix in told.select("reason", "count", "first", "fix").head(MAX_FIXES).rows()
    ]
    if len(told) > MAX_FIXES:
        left = int(told["count"][MAX_FIXES:].sum())
        lines.append(f"{left:,} for other reasons: tables/rejected.parquet has the fix of each")
    return "\n".join([*lines, otherwise] if otherwise else lines)


def nothing_left(rejected: pl.DataFrame, otherwise: str) -> Outcome:
    """The gate's answer where no sample is left (FAILURES I08, B08); no recipe opens it.

    Args:
        rejected: Of all stages so far; what filters, limits and settings left out counts too.
        otherwise: The fix where nothing was rejected.
    """
    numbers = {"rejected": len(rejected), "left": 0}
    if rejected.is_empty():
        return Outcome(False, "no sample is left, and none was rejected", otherwise, (), numbers, final=True)
    reasons = rejected.group_by("reason").len().sort("len", "reason", descending=[True, False])
    told = ", ".join(f"{count:,} {reason}" for reason, count in reasons.iter_rows())
    summary = f"no sample is left of {counted(len(rejected), 'image')}: {told}"
    rows = most_frequent_first(rejected).select(SHOWN).rows(named=True)
    return Outcome(False, summary, fixes(rejected), rows, numbers, final=True)


def most_frequent_first(rejected: pl.DataFrame) -> pl.DataFrame:
    """The same rows, those of the most frequent reason first, of one reason by sample."""
    return rejected.sort(pl.len().over("reason"), "reason", "sample_id", descending=[True, False, False])
