"""Levels of more than 8 bits: exact rounding, the choice of white, and the memory of the conversion."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from pipeline.images.colour import opacity, to_srgb
from pipeline.images.decode import read_header
from tests.pipeline.pixels import WHITE, decoded, saved
from tests.profiles import SRGB, matrix_profile


def shown(levels: npt.NDArray[np.generic]) -> list[int]:
    """Return the red channel of the converted image, row by row."""
    return np.asarray(to_srgb(Image.fromarray(levels), WHITE))[..., 0].ravel().tolist()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_each_of_65536_levels_is_rounded_to_the_nearest_of_256(dtype: type[np.number]) -> None:
    """65,535 is 257 * 255, so that no level is halfway between two."""
    levels = np.arange(65_536)
    expected = (levels + 128) // 257
    assert shown(levels.reshape(256, 256).astype(dtype)) == expected.tolist()


def tiff_of_12_bits(levels: npt.NDArray[np.int64]) -> bytes:
    """Return a grey TIFF that stores two pixels in three bytes, which Pillow opens as mode I;16."""
    height, width = levels.shape
    first, second = levels[:, ::2], levels[:, 1::2]
    pixels = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=-1)
    strip = pixels.astype(np.uint8).tobytes()
    # Edges, bits per sample, no compression, black is zero, and a single strip behind the header.
    entries = [(256, width), (257, height), (258, 12), (259, 1), (262, 1), (273, 8), (277, 1), (278, height)]
    entries.append((279, len(strip)))
    directory = struct.pack("<H", len(entries))
    directory += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<I", 8 + len(strip)) + strip + directory + b"\0\0\0\0"


def test_the_white_of_a_tiff_of_12_bits_is_4095() -> None:
    levels = np.arange(4096).reshape(64, 64)
    pixels = decoded(tiff_of_12_bits(levels))
    expected = np.floor(levels * 255 / 4095 + 0.5)
    np.testing.assert_array_equal(pixels[..., 0], expected)


@pytest.mark.parametrize(
    ("levels", "expected"),
    [([0, 65_536, 2**30], [0, 0, 128]), ([-1, 0, 1], [0, 128, 255]), ([-1, 0, 0], [0, 255, 255])],
    ids=str,
)
@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_white_does_not_depend_on_the_highest_level_unless_a_level_is_negative(
    dtype: type[np.number], levels: list[int], expected: list[int]
) -> None:
    assert shown(np.array([levels], dtype=dtype)) == expected


def test_levels_of_32_bits_are_scaled_by_exactly_the_largest_integer() -> None:
    """The boundary between 254 and 255 is at 509 / 510 of white; another white by 1 would move it."""
    boundary = (2**31 - 1) * 509 // 510
    assert shown(np.array([[0, boundary, boundary + 1]], dtype=np.int32)) == [0, 254, 255]


def test_the_opacity_of_an_opaque_image_is_255() -> None:
    alpha = opacity(Image.new("RGBA", (3, 2), (10, 20, 30, 255)))
    assert alpha is not None
    assert (alpha.mode, alpha.size, alpha.getextrema()) == ("L", (3, 2), (255, 255))


def test_a_profile_that_changes_only_full_levels_is_converted() -> None:
    """In its curve, 255 is as dark as 245; all other levels are those of sRGB."""
    levels = np.append(np.arange(255), 245) / 255
    light = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
    curve = b"curv\0\0\0\0" + struct.pack(">I", 256) + (light * 65_535).round().astype(">u2").tobytes()
    image = Image.fromarray(np.array([[[0, 100, 254], [255, 255, 255]]], dtype=np.uint8))
    data = saved(image, icc_profile=matrix_profile(SRGB, curve))
    assert read_header(data).notes == ("colour_profile",)
    np.testing.assert_allclose(decoded(data), [[[0, 100, 254], [245, 245, 245]]], atol=1)


@pytest.mark.parametrize("mode", ["I", "F", "I;16"])
def test_deep_levels_are_converted_in_the_memory_of_one_strip(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.images.colour.STRIP_PX", 10_000)
    image = Image.new(mode, (1_000, 1_000), 1)
    tracemalloc.start()
    try:
        to_srgb(image, WHITE)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10_000 * 50, "the image has 1,000,000 pixels, and a strip 10,000"
