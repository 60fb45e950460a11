"""Sheets and charts show the right content and stay small."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.reporting.pictures import (
    LABEL_PX,
    THUMBNAIL_PX,
    SheetImage,
    SheetRow,
    chart,
    contact_sheet,
    jpeg,
    png,
    thumbnail,
)
from pipeline.storage.source import LocalSource, SourceFile

SMALL_PX = THUMBNAIL_PX - 6
"""Edge of a thumbnail inside its square."""


def save(path: Path, colour: tuple[int, int, int] = (200, 120, 40), size: tuple[int, int] = (80, 40)) -> Path:
    Image.new("RGB", size, colour).save(path)
    return path


def test_a_thumbnail_is_darkened_outside_its_box(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png")
    small = np.asarray(thumbnail(SheetImage(path, (40, 80), (20.0, 0.0, 60.0, 40.0))))
    assert small.shape == (SMALL_PX // 2, SMALL_PX, 3)
    quarter = SMALL_PX // 4
    assert (small[:, quarter + 2 : -quarter - 2] == (200, 120, 40)).all()
    assert (small[:, : quarter - 2].max(axis=(0, 1)) < 100).all()
    assert (small[:, 2 - quarter :].max(axis=(0, 1)) < 100).all()


def test_a_thumbnail_without_a_box_is_not_darkened(tmp_path: Path) -> None:
    small = np.asarray(thumbnail(SheetImage(save(tmp_path / "a.png"), (40, 80))))
    assert (small == (200, 120, 40)).all()


@pytest.mark.parametrize("content", [None, b"", b"\x89PNG\r\n\x1a\n broken"])
def test_I20_an_image_that_became_unreadable_is_a_grey_frame(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "gone.png"
    if content is not None:
        path.write_bytes(content)
    small = np.asarray(thumbnail(SheetImage(path, (40, 80), (0.0, 0.0, 40.0, 40.0))))
    assert small.shape == (SMALL_PX // 2, SMALL_PX, 3)
    assert (small == 211).all()


def test_an_image_of_extreme_shape_has_a_thumbnail(tmp_path: Path) -> None:
    path = save(tmp_path / "line.png", size=(6000, 1))
    small = thumbnail(SheetImage(path, (1, 6000), (2999.0, 0.0, 3001.0, 1.0)))
    assert small.size == (SMALL_PX, 1)


def test_a_sheet_has_a_line_per_row_with_its_images_in_order(tmp_path: Path) -> None:
    red, blue = save(tmp_path / "r.png", (250, 0, 0)), save(tmp_path / "b.png", (0, 0, 250))
    strips = [
        SheetRow("two", [SheetImage(red, (40, 80)), SheetImage(blue, (40, 80))]),
        SheetRow("one", [SheetImage(blue, (40, 80))]),
    ]
    picture = np.asarray(Image.open(io.BytesIO(contact_sheet(strips, log=print))).convert("RGB"), dtype=int)
    assert picture.shape == (2 * THUMBNAIL_PX, LABEL_PX + 2 * THUMBNAIL_PX, 3)
    centres = [
        picture[THUMBNAIL_PX // 2, LABEL_PX + THUMBNAIL_PX // 2],
        picture[THUMBNAIL_PX // 2, LABEL_PX + 3 * THUMBNAIL_PX // 2],
        picture[3 * THUMBNAIL_PX // 2, LABEL_PX + THUMBNAIL_PX // 2],
        picture[3 * THUMBNAIL_PX // 2, LABEL_PX + 3 * THUMBNAIL_PX // 2],
    ]
    assert np.abs(np.array(centres) - [(250, 0, 0), (0, 0, 250), (0, 0, 250), (255, 255, 255)]).max() < 12
    assert picture[:THUMBNAIL_PX, :LABEL_PX].min() < 100, "the label is missing"


def sheet(images: list[SheetImage], title: str = "") -> Any:
    data = contact_sheet([SheetRow("", images)], title=title, log=print)
    return np.asarray(Image.open(io.BytesIO(data)).convert("L"), dtype=int)


def text_lines(picture: Any) -> int:
    """Return the number of lines of dark text."""
    return int((np.diff((picture.min(axis=1) < 130).astype(int)) == 1).sum())


def test_names_and_captions_are_written_below_the_thumbnails(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png")
    plain = sheet([SheetImage(path)])
    named = sheet([SheetImage(path, name="rose_0001.jpg"), SheetImage(path)])
    caption = "a red rose in a glass vase on a windowsill"
    captioned = sheet([SheetImage(path, name="rose_0001.jpg", caption=caption)])
    assert plain.shape[0] == THUMBNAIL_PX < named.shape[0] < captioned.shape[0]
    assert text_lines(named[THUMBNAIL_PX:, LABEL_PX : LABEL_PX + THUMBNAIL_PX]) == 1
    assert text_lines(named[THUMBNAIL_PX:, LABEL_PX + THUMBNAIL_PX :]) == 0
    assert text_lines(captioned[THUMBNAIL_PX:, LABEL_PX:]) >= 3


def test_a_title_is_written_above_the_rows(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png")
    titled = sheet([SheetImage(path)], title="Buckets (height x width)")
    assert text_lines(titled[: titled.shape[0] - THUMBNAIL_PX]) == 1


@pytest.mark.parametrize("name", ["日本語.jpg", "a\nb\x1b.png", "\ud800.png", "роза.jpg", "n" * 300])
def test_I18_any_name_and_caption_can_be_written(tmp_path: Path, name: str) -> None:
    assert sheet([SheetImage(save(tmp_path / "a.png"), name=name, caption=name * 3)]).shape[0] > THUMBNAIL_PX


def test_a_jpeg_reduces_quality_before_size_to_stay_small() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    sizes = {limit: jpeg(picture, limit) for limit in (200_000, 70_000, 5_000)}
    too_large = {limit: len(data) for limit, data in sizes.items() if len(data) > limit}
    assert too_large == {}, "number of bytes, by limit"
    shapes = [Image.open(io.BytesIO(data)).size for data in sizes.values()]
    assert shapes[0] == (400, 400)
    assert shapes[2][0] < 200


def test_a_chart_is_a_png_of_the_requested_size() -> None:
    figure, axes = chart(480, 300)
    axes.plot([0, 1, 2], [3, 1, 2])
    data = png(figure)
    picture = Image.open(io.BytesIO(data))
    assert (picture.format, picture.size) == ("PNG", (480, 300))
    assert len(data) < 30_000


class SlowSource(LocalSource):
    """A folder on a slow disk."""

    def open(self, path: str, num_bytes: int = 0) -> io.BufferedReader:
        time.sleep(0.2)
        return super().open(path, num_bytes)


def test_slow_thumbnails_report_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.reporting.progress.FIRST_LINE_S", 0.02)
    Image.new("RGB", (20, 20), "red").save(tmp_path / "a.png")
    lines: list[str] = []
    images = [SheetImage(SourceFile(SlowSource(tmp_path), "a.png"))] * 3
    assert contact_sheet([SheetRow("slow", images)], log=lines.append).startswith(b"\xff\xd8")
    assert lines
    assert [line for line in lines if not re.match("thumbnails drawn: . of 3, ", line)] == []
