"""The most frequent reasons and the usual fix of each."""

from __future__ import annotations

import polars as pl

from pipeline.checks.reasons import fixes, most_frequent_first
from pipeline.storage.tables import REJECTED


def rejected(*rows: tuple[str, str, str]) -> pl.DataFrame:
    """Rows of (sample, reason, fix)."""
    parts = [dict(zip(("sample_id", "reason", "fix"), row, strict=True)) for row in rows]
    return pl.DataFrame([{**dict.fromkeys(REJECTED, "x"), **part} for part in parts], schema=REJECTED)


def test_of_one_reason_the_fix_that_most_samples_have_is_told() -> None:
    rows = rejected(
        ("d/c", "too_large", "cut it"),
        ("d/b", "too_large", "raise the limit"),
        ("d/a", "too_large", "raise the limit"),
    )
    assert fixes(rows) == "3 too large, the first is d/a: raise the limit"


def test_equally_frequent_reasons_and_fixes_come_by_name_whatever_the_order_of_the_rows() -> None:
    rows = rejected(("d/b", "b", "two"), ("d/d", "b", "one"), ("d/a", "a", "y"), ("d/c", "a", "y"))
    told = "2 a, the first is d/a: y\n2 b, the first is d/b: one\nor not"
    assert fixes(rows, otherwise="or not") == fixes(rows.reverse(), otherwise="or not") == told


def test_rows_come_by_the_frequency_of_their_reason() -> None:
    rows = rejected(("d/a", "x", ""), ("d/b", "y", ""), ("d/d", "y", ""), ("d/c", "y", ""))
    assert most_frequent_first(rows)["sample_id"].to_list() == ["d/b", "d/c", "d/d", "d/a"]
