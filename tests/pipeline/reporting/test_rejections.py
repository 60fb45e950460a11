"""Rejected samples: conservation, the most frequent reasons, and the most frequent fix of each."""

from __future__ import annotations

import os

import polars as pl

from pipeline.images.formats import ImageError
from pipeline.reporting.rejections import (
    check_conservation,
    count_by_reason,
    most_frequent_first,
    most_frequent_fixes,
    no_samples_left,
    printable,
    rejection,
)
from pipeline.storage.tables import REJECTED


def rejected(*rows: tuple[str, str, str]) -> pl.DataFrame:
    """Return rejected rows from (sample, reason, fix)."""
    parts = [dict(zip(("sample_id", "reason", "fix"), row, strict=True)) for row in rows]
    return pl.DataFrame([{**dict.fromkeys(REJECTED, "x"), **part} for part in parts], schema=REJECTED)


def test_conservation_names_lost_duplicate_and_unknown_samples() -> None:
    outcome = check_conservation(["d", "a", "b", "c"], ["y", "a", "b", "x"], ["b", "x", "z"], "stage")
    assert not outcome.passed
    assert outcome.rows == [
        {"sample_id": "c", "problem": "lost"},
        {"sample_id": "d", "problem": "lost"},
        {"sample_id": "b", "problem": "kept and rejected"},
        {"sample_id": "x", "problem": "kept and rejected"},
        {"sample_id": "x", "problem": "not in the input"},
        {"sample_id": "y", "problem": "not in the input"},
        {"sample_id": "z", "problem": "not in the input"},
    ]
    assert outcome.numbers == {"in": 4, "kept": 4, "rejected": 3}
    counts = "2 lost, 2 kept and rejected, 3 not in the input"
    assert outcome.summary == f"4 in, 4 kept, 3 rejected: {counts}"


def test_a_sample_with_several_rows_counts_once_in_a_complete_stage() -> None:
    outcome = check_conservation(["a", "b", "b"], ["a", "a"], ["b"], "stage")
    assert (outcome.passed, outcome.summary) == (True, "2 in, 1 kept, 1 rejected")
    assert outcome.numbers == {"in": 2, "kept": 1, "rejected": 1}
    assert check_conservation([], [], [], "stage").passed


def test_the_most_frequent_fix_of_a_reason_is_shown() -> None:
    rows = rejected(
        ("d/c", "too_large", "cut it"),
        ("d/b", "too_large", "raise the limit"),
        ("d/a", "too_large", "raise the limit"),
    )
    assert most_frequent_fixes(rows) == "3 too large, the first is d/a: raise the limit"


def test_ties_are_broken_by_name_in_any_row_order() -> None:
    rows = rejected(("d/b", "b", "two"), ("d/d", "b", "one"), ("d/a", "a", "y"), ("d/c", "a", "y"))
    expected = "2 a, the first is d/a: y\n2 b, the first is d/b: one\nor not"
    assert most_frequent_fixes(rows, otherwise="or not") == expected
    assert most_frequent_fixes(rows.reverse(), otherwise="or not") == expected


def test_rows_are_sorted_by_the_frequency_of_their_reason_then_by_reason_and_name() -> None:
    rows = rejected(
        *(("d/a", "x", ""), ("d/e", "w", "")),
        *(("d/b", "y", ""), ("d/d", "y", ""), ("d/c", "y", "")),
    )
    assert most_frequent_first(rows)["sample_id"].to_list() == ["d/b", "d/c", "d/d", "d/e", "d/a"]


def test_I08_no_recipe_can_allow_that_no_samples_are_left() -> None:
    rows = rejected(("d/b", "b", "x"), ("d/a", "a", "y"), ("d/c", "c", "z"), ("d/d", "c", "z"))
    some = no_samples_left(rows, "add images")
    assert some.summary == "no samples are left of 4 images: 2 c, 1 a, 1 b"
    assert some.numbers == {"rejected": 4, "left": 0}
    assert some.fix.splitlines() == [
        "2 c, the first is d/c: z",
        "1 a, the first is d/a: y",
        "1 b, the first is d/b: x",
    ]
    columns = {"reason": "c", "detail": "x", "fix": "z"}
    assert some.rows[:2] == [{"sample_id": "d/c", **columns}, {"sample_id": "d/d", **columns}]
    none = no_samples_left(rejected(), "add images")
    assert (none.fix, none.numbers) == ("add images", {"rejected": 0, "left": 0})
    assert [(each.passed, each.final) for each in (some, none)] == [(False, True)] * 2


def test_reasons_are_counted_and_sorted_by_frequency() -> None:
    assert list(count_by_reason(["a", "b", "b"]).items()) == [("b", 2), ("a", 1)]


def test_I18_undecodable_names_become_text_that_a_table_can_store() -> None:
    name = os.fsdecode(b"caf\xe9")
    assert printable(name) == "caf\\xe9"
    assert printable("caf\u00e9") == "caf\u00e9"
    row = rejection(ImageError("truncated", name, fix=name), "raw_images", None)
    assert (row["detail"], row["fix"], row["stage"]) == ("caf\\xe9", "caf\\xe9", "raw_images")
