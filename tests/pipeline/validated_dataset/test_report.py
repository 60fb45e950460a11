"""The report shows kept and rejected images and is drawn again only if a table changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image

from pipeline.reporting.lettering import line_height_px
from pipeline.reporting.pictures import LABEL_PX, MAX_SHEET_BYTES, NAME_PX, THUMBNAIL_PX
from pipeline.storage.tables import empty
from pipeline.validated_dataset.report import (
    KEPT_FILE,
    REJECTED_FILE,
    REPLACED_FILE,
    SPREAD_FILE,
    TAGS_FILE,
    write_dataset_report,
)


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


def test_the_pictures_show_kept_and_rejected_images_and_are_small(filled: Any) -> None:
    report = write(filled)
    kept, rejected = (np.asarray(Image.open(report / name)) for name in (KEPT_FILE, REJECTED_FILE))
    line_px = line_height_px(NAME_PX)
    assert kept.shape[:2] == (4 * (THUMBNAIL_PX + 2 * line_px), LABEL_PX + 6 * THUMBNAIL_PX)
    row_px = THUMBNAIL_PX + line_px
    assert rejected.shape[:2] == (2 * row_px, LABEL_PX + THUMBNAIL_PX)
    frames = [rejected[row * row_px + THUMBNAIL_PX // 2, LABEL_PX + 30 : -30] for row in range(2)]
    flat = sorted(int(frame.std()) for frame in frames)
    assert flat[0] < 3, "an empty file must be grey"
    assert flat[1] > 10, "an image without a caption must be shown"
    Image.open(report / SPREAD_FILE).load()
    assert max(path.stat().st_size for path in report.iterdir()) <= MAX_SHEET_BYTES


def test_pictures_are_drawn_again_only_if_a_table_changes(filled: Any) -> None:
    report = write(filled)
    before = {path.name: path.stat().st_mtime_ns for path in report.iterdir()}
    write(filled)
    assert {path.name: path.stat().st_mtime_ns for path in report.iterdir()} == before
    (filled.root / "empty.png").unlink()
    (filled.root / "without.png").unlink()
    write(filled)
    assert not (report / REJECTED_FILE).exists(), "the picture of rejected images must be removed"
    assert (report / KEPT_FILE).stat().st_mtime_ns != before[KEPT_FILE]


def test_a_report_of_an_earlier_version_is_drawn_again(filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr("pipeline.validated_dataset.report.REPORT_FORMAT", "")
        report = write(filled)
        (report / KEPT_FILE).write_bytes(b"without names")
    write(filled)
    assert (report / KEPT_FILE).read_bytes() != b"without names"


def test_one_image_has_no_histogram_of_one_bar(folder: Any) -> None:
    folder.add("one.png")
    picture = np.asarray(Image.open(write(folder) / SPREAD_FILE).convert("RGB"), dtype=int)
    assert not (np.abs(picture - (31, 119, 180)).max(axis=2) < 30).any()
    assert (picture.max(axis=2) < 100).sum() > 200, "the values are missing"


def test_empty_tables_give_no_pictures(folder: Any) -> None:
    report = write_dataset_report(folder.recipe, empty("validated_dataset"), empty("rejected"), log=print)
    assert [path.name for path in report.iterdir()] == ["made_for.txt"]


def test_I25_files_that_the_scan_did_not_read_are_not_opened(folder: Any) -> None:
    """A pipe would block, and a link that leads out would show a foreign picture."""
    os.mkfifo(folder.root / "pipe.png")
    row = {"sample_id": "d/pipe.png", "dataset": "d", "path": "pipe.png", "stage": "raw_images"}
    row |= {"reason": "special_file", "detail": "x", "fix": "x", "content_hash": None}
    rejected = pl.DataFrame([row], schema=empty("rejected").schema)
    write_dataset_report(folder.recipe, empty("validated_dataset"), rejected, log=print)


def test_tags_of_several_samples_are_counted_the_most_frequent_first(folder: Any) -> None:
    for name, caption in {"a": "rose, red , rose", "b": "red, vase", "c": "Rose, red", "d": "rose"}.items():
        folder.add(f"{name}.png", caption=caption)
    lines = (write(folder) / TAGS_FILE).read_text(encoding="utf-8").splitlines()
    assert lines == ["tag,samples", "red,3", "rose,2"]


def test_replacements_are_shown_before_and_after_and_sources_stay_as_they_are(folder: Any) -> None:
    files = [folder.add(f"{name}.png", caption=f"1girl, {name}") for name in ("a", "b")]
    folder.add("c.png", caption="a vase")
    assert not (write(folder) / REPLACED_FILE).exists()

    folder.captions = {"replace": [{"find": "1girl", "with": "woman"}], "prefix": "photo of "}
    replaced = pl.read_csv(write(folder) / REPLACED_FILE)
    assert replaced.rows() == [("d/a.png", "1girl, a", "woman, a"), ("d/b.png", "1girl, b", "woman, b")]
    assert folder.tables.read("validated_dataset")["caption"][0] == "photo of woman, a"
    assert files[0].with_suffix(".txt").read_text(encoding="utf-8") == "1girl, a"

    folder.captions = {}
    assert not (write(folder) / REPLACED_FILE).exists()


def test_replacements_in_the_captions_of_a_manifest_are_shown(folder: Any) -> None:
    folder.add("a.png", caption=None)
    manifest = folder.root / "images.csv"
    manifest.write_text("path,caption\na.png,a red rose\n", encoding="utf-8")
    folder.dataset = {"path": str(manifest)}
    folder.captions = {"from": "column", "replace": [{"find": "red", "with": "blue"}]}
    assert pl.read_csv(write(folder) / REPLACED_FILE).rows() == [("d/a.png", "a red rose", "a blue rose")]
