"""Scans of a JPEG are counted without decoding it, whatever stands between and behind them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pipeline.images.decode import decode
from pipeline.images.formats import ImageError
from pipeline.images.jpeg_scans import MAX_JPEG_SCANS, count_scans
from tests.hostile_images import jpeg_with_scans

WHITE = (255, 255, 255)
SOS, EOI = b"\xff\xda", b"\xff\xd9"


def jpeg(size: int = 64, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.radial_gradient("L").resize((size, size)).convert("RGB").save(file, "JPEG", **options)
    return file.getvalue()


def test_a_baseline_jpeg_has_one_scan_and_a_progressive_one_ten() -> None:
    assert count_scans(io.BytesIO(jpeg())) == 1
    assert count_scans(io.BytesIO(jpeg(progressive=True))) == 10


def test_thumbnails_and_appended_data_are_no_scans() -> None:
    thumbnails = b"\xff\xe1\xff\xfe" + SOS * 32_766
    baseline = jpeg()
    assert count_scans(io.BytesIO(baseline[:2] + thumbnails + baseline[2:] + SOS * 200)) == 1
    progressive = jpeg(progressive=True)
    data = progressive[:2] + thumbnails + progressive[2:] + SOS * 200
    assert count_scans(io.BytesIO(data)) == 10
    assert decode(data, WHITE).size == (64, 64)


def test_the_count_is_the_same_in_a_file_and_leaves_its_position(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(jpeg_with_scans(50))
    with path.open("rb") as file:
        file.seek(3)
        assert (count_scans(file), file.tell()) == (50, 3)


def test_the_largest_number_of_scans_decodes_and_one_more_is_rejected_with_a_fix() -> None:
    assert decode(jpeg_with_scans(MAX_JPEG_SCANS), WHITE).size == (64, 64)
    with pytest.raises(ImageError, match="at most 100 scans") as caught:
        decode(jpeg_with_scans(MAX_JPEG_SCANS + 1), WHITE)
    assert caught.value.reason == "too_many_scans"
    assert "save it again" in caught.value.fix


def test_an_end_marker_inside_a_segment_does_not_hide_the_scans_behind_it() -> None:
    comment = b"\xff\xfe\x00\x06" + EOI + SOS
    data = jpeg_with_scans(500, between=comment)
    assert count_scans(io.BytesIO(data)) == MAX_JPEG_SCANS + 1


@pytest.mark.timeout(10)
def test_thousands_of_scans_are_rejected_at_once(tmp_path: Path) -> None:
    path = tmp_path / "slow.jpg"
    path.write_bytes(jpeg_with_scans(2_000, edge_px=1_024))
    with pytest.raises(ImageError) as caught:
        decode(path, WHITE)
    assert caught.value.reason == "too_many_scans"
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    "data", [b"\xff\xd8\xff", b"\xff\xd8\xff\xda", b"\xff\xd8\xff\xc2\x00\x00\xff\xda\0"]
)
def test_a_damaged_header_is_no_error_of_the_count(data: bytes) -> None:
    assert count_scans(io.BytesIO(data)) in {0, 1}
