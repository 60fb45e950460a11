"""Rejections become rows that a table can store."""

from __future__ import annotations

import os

from pipeline.images.formats import ImageError
from pipeline.raw_images.rejection import count_by_reason, printable, rejection


def test_reasons_are_counted_and_sorted_by_frequency() -> None:
    assert list(count_by_reason(["a", "b", "b"]).items()) == [("b", 2), ("a", 1)]


def test_I18_undecodable_names_become_text_that_a_table_can_store() -> None:
    name = os.fsdecode(b"caf\xe9")
    assert printable(name) == "caf\\xe9"
    assert printable("caf\u00e9") == "caf\u00e9"
    row = rejection(ImageError("truncated", name, fix=name), "raw_images", None)
    assert (row["detail"], row["fix"], row["stage"]) == ("caf\\xe9", "caf\\xe9", "raw_images")
