"""The funnel's lines and the parts of rejected rows."""

from __future__ import annotations

import os

from pipeline.images.formats import ImageError
from pipeline.raw_images.funnel import Funnel, by_reason, printable, refusal


def test_the_lines_are_aligned_and_conserve() -> None:
    funnel = Funnel(1200, 1195, {"hidden": 3, "special": 10}, {"truncated": 4, "caption_missing": 1})
    assert funnel.lines() == [
        "1,200  found",
        "   13  passed over",
        "   10    special",
        "    3    hidden",
        "    5  rejected",
        "    4    truncated",
        "    1    caption missing",
        "1,195  kept",
    ]


def test_reasons_are_counted_most_frequent_first() -> None:
    assert list(by_reason(["a", "b", "b"]).items()) == [("b", 2), ("a", 1)]


def test_I18_text_from_undecodable_names_can_be_written_into_a_table() -> None:
    name = os.fsdecode(b"caf\xe9")
    assert printable(name) == "caf\\xe9"
    assert printable("caf\u00e9") == "caf\u00e9"
    row = refusal(ImageError("truncated", name, fix=name), "raw_images", None)
    assert (row["detail"], row["fix"], row["stage"]) == ("caf\\xe9", "caf\\xe9", "raw_images")
