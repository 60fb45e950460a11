"""The pictures of validated_dataset: what is kept and what is not, made anew when a table changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image

from pipeline.reporting.pictures import LABEL_PX, THUMBNAIL_PX
from pipeline.storage.tables import empty
from pipeline.validated_dataset.report import KEPT_FILE, REJECTED_FILE, SPREAD_FILE, write_dataset_report


def write(folder: Any) -> Path:
    raw, valid = folder.scan(), folder.validate()
    return write_dataset_report(
        folder.recipe, valid.table, pl.concat([raw.rejected, valid.rejected]), log=folder.log.append
    )


@pytest.fixture
def filled(folder: Any) -> Any:
    for index in range(20):
        folder.add(f"{index:02}.png", folder.picture(index, 24 + index, 40))
    folder.add("empty.png", b"")
    folder.add("without.png", folder.picture(99), caption=None)
    return folder


def test_the_pictures_are_small_and_of_kept_and_rejected(filled: Any) -> None:
    report = write(filled)
    kept, rejected = (np.asarray(Image.open(report / name)) for name in (KEPT_FILE, REJECTED_FILE))
    assert kept.shape[:2] == (3 * THUMBNAIL_PX, LABEL_PX + 8 * THUMBNAIL_PX)
    assert rejected.shape[:2] == (2 * THUMBNAIL_PX, LABEL_PX + THUMBNAIL_PX)
    frames = [rejected[place * THUMBNAIL_PX + THUMBNAIL_PX // 2, LABEL_PX + 30 : -30] for place in range(2)]
    flat = sorted(int(frame.std()) for frame in frames)
    assert flat[0] < 3, "a file without bytes is shown as something"
    assert flat[1] > 10, "an image without a caption is not shown"
    Image.open(report / SPREAD_FILE).load()
    assert sum(path.stat().st_size for path in report.iterdir()) < 200_000


def test_unchanged_tables_are_not_drawn_again_and_changed_ones_are(filled: Any) -> None:
    report = write(filled)
    before = {path.name: path.stat().st_mtime_ns for path in report.iterdir()}
    write(filled)
    assert {path.name: path.stat().st_mtime_ns for path in report.iterdir()} == before
    (filled.root / "empty.png").unlink()
    (filled.root / "without.png").unlink()
    write(filled)
    assert not (report / REJECTED_FILE).exists(), "what is no longer rejected is still shown"
    assert (report / KEPT_FILE).stat().st_mtime_ns != before[KEPT_FILE]


def test_nothing_kept_and_nothing_rejected_is_no_picture(folder: Any) -> None:
    report = write_dataset_report(folder.recipe, empty("validated_dataset"), empty("rejected"), log=print)
    assert [path.name for path in report.iterdir()] == ["made_for.txt"]


def test_I25_what_the_scan_did_not_read_is_not_opened(folder: Any) -> None:
    """A pipe would block for ever, a link that leads out would show somebody else's picture."""
    os.mkfifo(folder.root / "pipe.png")
    row = {"sample_id": "d/pipe.png", "dataset": "d", "path": "pipe.png", "stage": "raw_images"}
    row |= {"reason": "special_file", "detail": "x", "fix": "x", "content_hash": None}
    rejected = pl.DataFrame([row], schema=empty("rejected").schema)
    write_dataset_report(folder.recipe, empty("validated_dataset"), rejected, log=print)
