"""The report of aspect_buckets: its table adds up, and its pictures are updated with the table."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image

from pipeline.aspect_buckets.report import (
    BUCKETS_FILE,
    CROPS_FILE,
    SIZES_FILE,
    WORST_FILE,
    write_bucket_report,
)
from pipeline.reporting.lettering import line_height_px
from pipeline.reporting.pictures import LABEL_PX, MAX_SHEET_BYTES, NAME_PX, THUMBNAIL_PX
from pipeline.storage.tables import empty

SIZES = [(24, 40)] * 5 + [(40, 24)] * 3 + [(200, 200), (300, 40), (640, 480)]


@pytest.fixture
def filled(folder: Any) -> Any:
    for index, (height, width) in enumerate(SIZES):
        folder.add(f"{index:02}.png", folder.picture(index, height, width))
    folder.ingest()
    folder.assign()
    return folder


def write(folder: Any) -> Path:
    return write_bucket_report(folder.recipe, folder.tables.read("aspect_buckets"), log=folder.log.append)


def test_the_table_adds_up_to_the_samples(filled: Any) -> None:
    buckets = pl.read_parquet(write(filled) / BUCKETS_FILE)
    table = filled.tables.read("aspect_buckets")
    assert buckets["samples"].sum() == len(SIZES)
    batch_size = filled.recipe.training.batch_size
    assert (buckets["full_batches"] * batch_size + buckets["in_partial_batch"]).to_list() == buckets[
        "draws"
    ].to_list()
    for row in buckets.iter_rows(named=True):
        bucket_rows = table.filter(pl.col("bucket") == row["bucket"])
        assert row["samples"] == row["draws"] == len(bucket_rows)
        assert row["crop_loss_max"] == max(bucket_rows["crop_loss"])
        assert row["crop_loss_mean"] == pytest.approx(sum(bucket_rows["crop_loss"]) / len(bucket_rows))
        assert row["upscaled"] == sum(scale > 1 for scale in bucket_rows["scale"]) / len(bucket_rows)


def test_the_pictures_exist_and_are_small(filled: Any) -> None:
    report = write(filled)
    for name in (SIZES_FILE, CROPS_FILE, WORST_FILE):
        Image.open(report / name).load()
    assert max(path.stat().st_size for path in report.iterdir()) <= MAX_SHEET_BYTES


def test_the_worst_crop_comes_first_with_its_cropped_part_darkened(folder: Any) -> None:
    """The middle of a white stripe with aspect ratio 12 is kept; the rest is darkened."""
    square, stripe = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (64, 64), "white").save(square, "PNG")
    Image.new("RGB", (1200, 100), "white").save(stripe, "PNG")
    folder.add("square.png", square.getvalue())
    folder.add("stripe.png", stripe.getvalue())
    folder.ingest()
    folder.assign()
    picture = np.asarray(Image.open(write(folder) / WORST_FILE).convert("L"), dtype=int)
    middle_px = line_height_px(NAME_PX) + 6 + THUMBNAIL_PX // 2  # below the title
    line = picture[middle_px, LABEL_PX : LABEL_PX + THUMBNAIL_PX]
    assert line[THUMBNAIL_PX // 2] > 230, "the kept middle is dark"
    assert max(line[12], line[-12]) < 130, "the cropped part is as light as the kept part"
    square = picture[middle_px, LABEL_PX + THUMBNAIL_PX + 12 : LABEL_PX + 2 * THUMBNAIL_PX - 12]
    assert square.min() > 230, "an image that loses nothing is darkened"


def test_an_unchanged_table_is_not_drawn_again(filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    report = write(filled)
    before = {path.name: path.stat().st_mtime_ns for path in report.iterdir()}
    write(filled)
    assert {path.name: path.stat().st_mtime_ns for path in report.iterdir()} == before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: folder.add("more.png", folder.picture(99, 30, 30)),
        lambda folder: folder.add("00.png", folder.picture(98, 24, 40)),
        lambda folder: (folder.root / "01.png").unlink(),
    ],
    ids=["added", "edited", "removed"],
)
def test_a_changed_table_is_drawn_again(filled: Any, change: Callable[[Any], object]) -> None:
    before = (write(filled) / CROPS_FILE).read_bytes()
    change(filled)
    filled.ingest()
    filled.assign()
    assert (write(filled) / CROPS_FILE).read_bytes() != before


def test_I20_a_missing_image_is_an_empty_frame(filled: Any) -> None:
    (filled.root / "00.png").unlink()
    Image.open(write(filled) / CROPS_FILE).load()


def test_an_empty_table_has_no_pictures(folder: Any) -> None:
    report = write_bucket_report(folder.recipe, empty("aspect_buckets"), log=print)
    assert len(pl.read_parquet(report / BUCKETS_FILE)) == 0
    assert not (report / CROPS_FILE).exists()
