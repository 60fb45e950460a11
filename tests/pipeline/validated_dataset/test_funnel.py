"""The funnel adds up and prints as one line."""

from __future__ import annotations

from pipeline.validated_dataset.funnel import funnel_rows, funnel_text


def test_the_text_is_one_line_and_adds_up() -> None:
    rows = funnel_rows(
        1195, passed_over={"hidden": 3, "special": 10}, rejected={"truncated": 4, "caption_missing": 1}
    )
    assert funnel_text(rows) == (
        "1,200 found, 13 ignored (10 special, 3 hidden), "
        "5 rejected (4 truncated, 1 caption missing), 1,195 kept"
    )


def test_numbers_without_kinds_have_no_parentheses() -> None:
    assert funnel_text(funnel_rows(24, passed_over={}, rejected={})) == (
        "24 found, 0 ignored, 0 rejected, 24 kept"
    )
