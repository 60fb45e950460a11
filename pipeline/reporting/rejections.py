"""Rejected samples: their columns, the conservation check, and the fixes that would recover most samples."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import polars as pl

from pipeline.errors import counted
from pipeline.images.formats import ImageError
from pipeline.reporting.findings import Outcome

MAX_FIXES = 3
"""Maximum number of reasons that a fix covers."""

REJECTED_COLUMNS = ("sample_id", "reason", "detail", "fix")
"""Columns of a rejected row that a finding shows."""


def check_conservation(
    before: Iterable[str], kept: Iterable[str], rejected: Iterable[str], stage: str
) -> Outcome:
    """Check that `kept` and `rejected` share no sample id and together are exactly `before`."""
    ids_in, ids_kept, ids_rejected = _unique_ids(before), _unique_ids(kept), _unique_ids(rejected)
    not_kept = _difference(ids_in, ids_kept)
    unknown = pl.concat([_difference(ids_kept, ids_in), _difference(ids_rejected, ids_in)])
    problems = {
        "lost": _difference(not_kept, ids_rejected),
        "kept and rejected": ids_rejected.filter(ids_rejected.is_in(ids_kept.implode())),
        "not in the input": unknown.unique(),
    }

    numbers = {"in": len(ids_in), "kept": len(ids_kept), "rejected": len(ids_rejected)}
    summary = f"{len(ids_in):,} in, {len(ids_kept):,} kept, {len(ids_rejected):,} rejected"
    rows = [
        {"sample_id": sample_id, "problem": problem}
        for problem, ids in problems.items()
        for sample_id in ids.sort()
    ]
    if not rows:
        return Outcome(True, summary, numbers=numbers)

    counts = ", ".join(f"{len(ids):,} {problem}" for problem, ids in problems.items() if len(ids))
    fix = f"start the job again: the table of {stage} is older than its input"
    return Outcome(False, f"{summary}: {counts}", fix, rows, numbers)


def _unique_ids(ids: Iterable[str]) -> pl.Series:
    return pl.Series(values=ids, dtype=pl.String).unique(maintain_order=True)


def _difference(ids: pl.Series, others: pl.Series) -> pl.Series:
    # `implode`, because Polars deprecates `is_in` with a plain series.
    return ids.filter(~ids.is_in(others.implode()))


def most_frequent_fixes(rejected: pl.DataFrame, *, otherwise: str = "") -> str:
    """Return one line for each of the most frequent reasons: count, reason, first sample and fix.

    Args:
        rejected: At least one row, with the columns of `tables.REJECTED`.
        otherwise: A last line with an alternative to all of these fixes.
    """
    # Samples of one reason may have different fixes: the most frequent one is shown, and ties go to the first
    # in alphabetical order.
    fix_counts = rejected.group_by("reason", "fix").agg(number=pl.len())
    usual_fix = fix_counts.sort("number", "fix", descending=[True, False]).unique(
        "reason", maintain_order=True
    )
    counts = rejected.group_by("reason").agg(count=pl.len(), first=pl.col("sample_id").min())
    reasons = counts.join(usual_fix, on="reason").sort("count", "reason", descending=[True, False])

    lines = [
        f"{count:,} {reason.replace('_', ' ')}, the first is {first}: {fix}"
        for reason, count, first, fix in reasons.select("reason", "count", "first", "fix")
        .head(MAX_FIXES)
        .rows()
    ]
    if len(reasons) > MAX_FIXES:
        num_others = int(reasons["count"][MAX_FIXES:].sum())
        lines.append(f"{num_others:,} for other reasons: tables/rejected.parquet has the fix of each")
    return "\n".join([*lines, otherwise] if otherwise else lines)


def no_samples_left(rejected: pl.DataFrame, otherwise: str) -> Outcome:
    """Return the failed outcome of a gate when no samples are left (FAILURES I08, B08).

    Args:
        rejected: Rows of all stages so far, including samples that filters, limits and settings excluded.
        otherwise: The fix if nothing was rejected.
    """
    # Final, because a recipe that allowed this gate would train on nothing.
    numbers = {"rejected": len(rejected), "left": 0}
    if rejected.is_empty():
        what = "no samples are left, although none were rejected"
        return Outcome(False, what, otherwise, (), numbers, final=True)

    reasons = rejected.group_by("reason").len().sort("len", "reason", descending=[True, False])
    counts = ", ".join(f"{count:,} {reason}" for reason, count in reasons.iter_rows())
    summary = f"no samples are left of {counted(len(rejected), 'image')}: {counts}"
    rows = most_frequent_first(rejected).select(REJECTED_COLUMNS).rows(named=True)
    return Outcome(False, summary, most_frequent_fixes(rejected), rows, numbers, final=True)


def most_frequent_first(rejected: pl.DataFrame) -> pl.DataFrame:
    """Return the rows sorted by reason, the most frequent first, and within a reason by sample id."""
    return rejected.sort(pl.len().over("reason"), "reason", "sample_id", descending=[True, False, False])


def rejection(err: ImageError, stage: str, content_hash: str | None) -> dict[str, Any]:
    """Return the columns that a rejection adds to a sample's `sample_id`, `dataset` and `path`."""
    return {
        "stage": stage,
        "reason": err.reason,
        "detail": printable(err.detail),
        "fix": printable(err.fix),
        "content_hash": content_hash,
    }


def count_by_reason(reasons: Iterable[str]) -> dict[str, int]:
    """Return the number of rejections for each reason, most frequent first."""
    return dict(Counter(reasons).most_common())


def printable(text: str) -> str:
    """Return the text as valid Unicode; the bytes of a file name that is not UTF-8 become escapes."""
    # A table accepts valid Unicode only, and such bytes are lone surrogates in the name.
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return os.fsencode(text).decode("utf-8", "backslashreplace")
    return text
