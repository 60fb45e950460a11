"""Orientations that are not valid, or are stored in unusual places; test_decode.py has the pixels."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from PIL import Image

from pipeline.images.decode import decode, read_header
from pipeline.images.geometry import Size
from pipeline.images.orientation import has_late_metadata, orientation_of, oriented_size
from tests.hostile_images import png_chunk
from tests.pipeline.pixels import WHITE, pattern, saved


def exif_with(kind: int, count: int, value: bytes) -> bytes:
    """Return EXIF data with one tag, the orientation."""
    entry = struct.pack("<HHI", 274, kind, count) + value.ljust(4, b"\0")
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + entry + b"\0\0\0\0"


SHORT, TEXT = 3, 2


@pytest.mark.parametrize(
    ("exif", "orientation"),
    [
        (exif_with(SHORT, 1, b"\x06"), 6),
        (exif_with(SHORT, 1, b"\x08"), 8),
        (exif_with(SHORT, 1, b"\0"), 1),
        (exif_with(SHORT, 1, b"\x09"), 1),
        (exif_with(SHORT, 1, b"\xff\xff"), 1),
        (exif_with(SHORT, 2, b"\x06\0\x06\0"), 1),
        (exif_with(TEXT, 2, b"6\0"), 1),
    ],
    ids=["6", "8", "0", "9", "65535", "two numbers", "a text"],
)
def test_an_orientation_that_is_not_a_number_from_1_to_8_is_ignored(exif: bytes, orientation: int) -> None:
    data = saved(Image.fromarray(pattern()), "JPEG", exif=exif)
    expected = Size(40, 24) if orientation > 1 else Size(24, 40)
    header, image = read_header(data), decode(data, WHITE)
    assert (header.orientation, header.size) == (orientation, expected)
    assert Size(image.height, image.width) == expected


def test_an_orientation_in_the_xmp_of_a_tiff_is_applied() -> None:
    data = saved(Image.fromarray(pattern()), "TIFF", tiffinfo={700: b'<x tiff:Orientation="8"/>'})
    header, image = read_header(data), decode(data, WHITE)
    assert (header.orientation, header.size) == (8, Size(40, 24))
    assert Size(image.height, image.width) == Size(40, 24)


def test_an_image_without_metadata_is_upright() -> None:
    image = Image.fromarray(pattern())
    assert orientation_of(image) == 1
    assert oriented_size(image, 4) == Size(24, 40)
    assert oriented_size(image, 5) == Size(40, 24)
    assert not has_late_metadata(image)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (b"eXIf", exif_with(SHORT, 1, b"\x06").removeprefix(b"Exif\0\0")),
        (b"tEXt", b"Comment\0text"),
        (b"zTXt", b"Comment\0\0" + zlib.compress(b"text")),
        (b"iTXt", b"Comment\0\0\0\0\0text"),
    ],
)
def test_metadata_are_late_if_they_are_behind_the_pixels_of_a_png(name: bytes, content: bytes) -> None:
    plain = saved(Image.fromarray(pattern()))
    late = plain[:-12] + png_chunk(name, content) + plain[-12:]
    early = plain[:33] + png_chunk(name, content) + plain[33:]
    for data, is_late in ((late, True), (early, False), (plain, False)):
        file = io.BytesIO(data)
        with Image.open(file) as image:
            position = file.tell()
            assert has_late_metadata(image) == is_late
            assert file.tell() == position, "Pillow reads the pixels from where it has stopped"


def test_a_loaded_png_has_no_late_metadata() -> None:
    plain = saved(Image.fromarray(pattern()))
    late = plain[:-12] + png_chunk(b"tEXt", b"a\0") + plain[-12:]
    with Image.open(io.BytesIO(late)) as image:
        assert has_late_metadata(image)
        image.load()
        assert not has_late_metadata(image)
        assert image.info["a"] == ""
