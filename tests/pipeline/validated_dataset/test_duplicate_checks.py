"""Checks for duplicates and for leaks between training and validation (FAILURES I24)."""

from __future__ import annotations

import io
from typing import Any

import polars as pl
from PIL import Image
from skimage import data

from pipeline.checks.findings import CheckContext, Finding
from pipeline.storage.tables.schemas import has_defect
from pipeline.validated_dataset import checks as validated_dataset


def checked(folder: Any) -> dict[str, Finding]:
    return {each.name: each for each in validated_dataset.run(CheckContext(folder.recipe, folder.tables))}


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_I24_copies_and_similar_images_are_listed_without_closing_a_gate(folder: Any) -> None:
    cat = Image.fromarray(data.cat())
    folder.add("cat.png", png(cat))
    folder.add("cat copy.png", png(cat))
    folder.add("cat small.png", png(cat.resize((200, 150))))
    folder.add("coffee.png", png(Image.fromarray(data.coffee())))
    folder.ingest()
    findings = checked(folder)
    assert [name for name, each in findings.items() if each.closes] == []
    similar = findings["look_alikes"]
    assert not similar.passed
    counts = "removed copies: 1; similar images: 2 in 1 group"
    assert similar.summary == f"{counts}; first: d/cat copy.png | d/cat small.png"
    assert [row["what"] for row in similar.rows] == ["look alike", "copy, left out"]
    assert findings["rejected_fraction"].numbers["rejected"] == 0
    assert folder.tables.read_rejected().filter(has_defect()).is_empty()


def test_single_colour_images_are_listed(folder: Any) -> None:
    folder.add("black.png", png(Image.new("RGB", (300, 200))))
    folder.add("coffee.png", png(Image.fromarray(data.coffee())))
    folder.ingest()
    findings = checked(folder)["one_colour"]
    assert (findings.passed, findings.closes) == (False, False)
    assert [row["sample_id"] for row in findings.rows] == ["d/black.png"]


def test_I24_an_image_on_both_sides_of_the_split_closes_the_gate(folder: Any) -> None:
    """The stage never splits a group, so the table is edited to put one content into two groups."""
    folder.validation_fraction, folder.duplicates = 0.5, "keep_all"
    for number in range(20):
        folder.add(f"{number:02}.png", folder.picture(number))
        folder.add(f"copy of {number:02}.png", folder.picture(number))
    table = folder.ingest().table
    findings = checked(folder)["validation_apart"]
    assert findings.passed
    assert 0 < findings.numbers["held_out"] < 40
    assert findings.numbers["held_out"] % 2 == 0
    wrong = (
        pl.when(pl.col("path").str.starts_with("copy")).then(pl.lit("0" * 64)).otherwise("duplicate_group")
    )
    folder.tables.write("validated_dataset", table.with_columns(duplicate_group=wrong))
    findings = checked(folder)["validation_apart"]
    assert findings.closes
    assert findings.numbers["leaks"] > 0
    assert "copy of" in findings.rows[0]["images"]
