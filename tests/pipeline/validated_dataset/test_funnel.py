"""The funnel adds up and prints as aligned lines."""

from __future__ import annotations

from pipeline.validated_dataset.funnel import funnel_lines, funnel_rows


def test_lines_are_aligned_and_add_up() -> None:
    rows = funnel_rows(
        1195, passed_over={"hidden": 3, "special": 10}, rejected={"truncated": 4, "caption_missing": 1}
    )
    assert funnel_lines(rows) == [
        "1,200  found",
        "   13  ignored",
        "   10    special",
        "    3    hidden",
        "    5  rejected",
        "    4    truncated",
        "    1    caption missing",
        "1,195  kept",
    ]
