"""Scans of a JPEG are counted without decoding it, whatever stands between and behind them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipeline.images.decode import decode
from pipeline.images.decode_limits import MAX_JPEG_SCANS, count_scans
from pipeline.images.formats import ImageError
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


class Remote(io.BufferedReader):
    """A file whose descriptor is missing in one of the ways of libraries for remote files."""

    def __init__(self, data: bytes, error: Exception) -> None:
        super().__init__(io.BytesIO(data))  # pyright: ignore[reportArgumentType] - it has a raw file's methods
        self._error = error

    def fileno(self) -> int:
        raise self._error


def test_the_count_is_the_same_in_any_file_and_leaves_its_position(tmp_path: Path) -> None:
    path, data = tmp_path / "a.jpg", jpeg_with_scans(50)
    path.write_bytes(data)
    remote = [Remote(data, error) for error in (OSError(), ValueError(), AttributeError())]
    with path.open("rb") as local:
        for file in (local, io.BytesIO(data), *remote):
            file.seek(len(data) - 3)
            assert (count_scans(file), file.tell()) == (50, len(data) - 3)


FRAMES = [0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF]
PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
OTHER_SEGMENTS = [0xC4, 0xC8, 0xCC, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, *range(0xE0, 0xF0), 0xFE]


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content


def frame(marker: int, channels: int) -> bytes:
    return segment(marker, bytes([8, 0, 64, 0, 64, channels]) + b"\x01\x11\x00" * channels)


def scan(channels: int) -> bytes:
    return segment(SOS[1], bytes([channels]) + b"\x01\x00" * channels + bytes(3))


@pytest.mark.parametrize("marker", FRAMES)
def test_every_scan_counts_if_the_frame_is_progressive_or_its_first_scan_lacks_a_channel(marker: int) -> None:
    start = b"\xff\xd8" + frame(marker, 3)
    complete, incomplete = start + scan(3) * 4 + EOI, start + scan(2) + scan(1) + scan(3) + EOI
    assert count_scans(io.BytesIO(complete)) == (4 if marker in PROGRESSIVE else 1)
    assert count_scans(io.BytesIO(incomplete)) == 3


@pytest.mark.parametrize("marker", OTHER_SEGMENTS)
def test_only_frames_state_the_number_of_channels(marker: int) -> None:
    like_a_frame = segment(marker, frame(0xC2, 9)[4:])
    data = b"\xff\xd8" + frame(0xC0, 3) + like_a_frame + scan(3) * 2 + EOI
    assert count_scans(io.BytesIO(data)) == 1


hidden = st.sampled_from([b"", b"\0", b"\xff", SOS, EOI, EOI + SOS * 120, frame(0xC2, 9), bytes(5) + b"\x09"])
other_segments = st.builds(segment, st.sampled_from(OTHER_SEGMENTS), hidden)
without_content = st.sampled_from([b"\xff\xfe\0\0", b"\xff\xfe\0\x01", b"\xff\x01", b"\xff\xd8"])
skipped = st.sampled_from(
    [b"\xff\x00", b"\xff\xff", b"\x07\xda", *(b"\xff" + bytes([0xD0 + n]) for n in range(8))]
)
anything_else = st.lists(other_segments | without_content | skipped, max_size=4).map(b"".join)
scans = st.lists(st.integers(1, 4), min_size=1, max_size=6)


@given(
    marker=st.sampled_from(FRAMES),
    channels=st.integers(1, 4),
    scans=scans,
    between=st.lists(anything_else, min_size=9, max_size=9),
    end=st.sampled_from([b"", EOI, EOI + SOS * 120, EOI + b"\0\2" + scan(3) * 3]),
)
def test_scans_are_counted_whatever_is_between_them(
    marker: int, channels: int, scans: list[int], between: list[bytes], end: bytes
) -> None:
    before, after, *rest = between
    data = b"\xff\xd8" + before + frame(marker, channels) + after
    data += b"".join(scan(number) + other for number, other in zip(scans, rest, strict=False)) + end
    has_all_channels = scans[0] >= channels and marker not in PROGRESSIVE
    assert count_scans(io.BytesIO(data)) == (1 if has_all_channels else len(scans))


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


def test_a_segment_ends_where_its_length_says() -> None:
    """The last byte of the comment and the damaged bytes behind it would otherwise look like a scan."""
    comment = segment(0xFE, b"\0\xff") + SOS[1:] + b"\0\2"
    data = b"\xff\xd8" + frame(0xC2, 3) + scan(3) + comment + scan(3) + EOI
    assert count_scans(io.BytesIO(data)) == 2


def test_only_the_number_of_channels_decides_and_not_their_names() -> None:
    channels = b"\x03\x01\x22\0\x02\x11\0\x03\x11\0"
    start = b"\xff\xd8" + segment(0xC0, bytes([8, 0, 64, 0, 64]) + channels)
    for first in (b"\0", b"\x7f"):
        complete = segment(SOS[1], b"\x03" + (first + b"\0") * 3 + bytes(3))
        incomplete = segment(SOS[1], b"\x02" + (first + b"\0") * 2 + bytes(3))
        assert count_scans(io.BytesIO(start + complete * 2 + EOI)) == 1
        assert count_scans(io.BytesIO(start + incomplete * 2 + EOI)) == 2


@pytest.mark.timeout(10)
def test_thousands_of_scans_are_rejected_at_once(tmp_path: Path) -> None:
    path = tmp_path / "slow.jpg"
    path.write_bytes(jpeg_with_scans(2_000, edge_px=1_024))
    with pytest.raises(ImageError) as caught:
        decode(path, WHITE)
    assert caught.value.reason == "too_many_scans"
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    "data",
    [b"\xff\xd8\xff", b"\xff\xd8\xff\xda", b"\xff\xd8\xff\xc2\x00\x00\xff\xda\0", b"\xff\xd8" + scan(0) * 2],
)
def test_a_damaged_header_is_no_error_of_the_count(data: bytes) -> None:
    assert count_scans(io.BytesIO(data)) == 1
