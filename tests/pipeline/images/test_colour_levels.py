"""Levels of more than 8 bits: exact rounding, the choice of white, and the memory of the conversion."""

from __future__ import annotations

import io
import struct
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from pipeline.images.colour import opacity, to_srgb
from pipeline.images.decode import DecodeLimits, decoding_of, read_header
from pipeline.images.decode import decoded as decoded_within
from pipeline.images.formats import ImageError
from tests.pipeline.images.tiffs import grey_tiff
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


def first_levels(data: bytes) -> tuple[list[int], str | None]:
    """Return the red channel of the first row, and the decoding rules."""
    rules: list[str] = []
    with decoded_within(io.BytesIO(data), WHITE, limits=DecodeLimits(), rules=rules) as image:
        return np.asarray(image)[0, :, 0].tolist(), decoding_of(rules)


WHITE_IS_ZERO: dict[str, tuple[Any, dict[str, bool], list[int]]] = {
    "16 bits": (np.array([[60_000, 1_000, 0, 65_535]], np.uint16), {}, [22, 251, 255, 0]),
    "16 bits, compressed": (np.array([[60_000, 257]], np.uint16), {"deflate": True}, [22, 254]),
    "floating point": (np.array([[0.25, 0.0, 1.0]], np.float32), {}, [191, 255, 0]),
    "floating point, big-endian": (np.array([[0.75, 0.0]], np.float32), {"big_endian": True}, [64, 255]),
    "floating point to 255": (np.array([[0, 55, 255]], np.float32), {"deflate": True}, [255, 200, 0]),
}


@pytest.mark.parametrize("name", WHITE_IS_ZERO)
def test_I28_white_is_zero_in_every_depth(name: str) -> None:
    levels, options, expected = WHITE_IS_ZERO[name]
    assert first_levels(grey_tiff(levels, white_is_zero=True, **options)) == (expected, "white_is_zero")
    inverted = [255 - level for level in expected]
    assert first_levels(grey_tiff(levels, **options)) == (inverted, None)


def test_I28_white_is_zero_in_8_bits_is_the_decoder_s_work_and_no_rule() -> None:
    levels = np.array([[240, 10, 0]], np.uint8)
    assert first_levels(grey_tiff(levels, white_is_zero=True)) == ([15, 245, 255], None)


def test_I28_the_strips_of_a_large_image_are_inverted_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.images.colour.STRIP_PX", 100)
    levels = np.arange(1_600, dtype=np.uint16).reshape(40, 40) * 40
    expected = np.floor((65_535 - levels.astype(float)) / 257 + 0.5)
    np.testing.assert_array_equal(decoded(grey_tiff(levels, white_is_zero=True))[..., 0], expected)


def photograph(white: float, dtype: type[np.number[Any]], size: int = 64) -> npt.NDArray[np.generic]:
    """Return levels from 0 to `white` with a bright half."""
    ramp = np.linspace(0, white, size * size).reshape(size, size)
    return ramp.astype(dtype)


def with_levels(levels: npt.NDArray[np.generic], *, high: float, number: int) -> npt.NDArray[np.generic]:
    changed = levels.copy()
    changed.ravel()[:: changed.size // number][:number] = high
    return changed


OVERSHOOT: dict[str, tuple[npt.NDArray[np.generic], float]] = {
    "sharpened halos above 1": (with_levels(photograph(1, np.float32), high=1.2, number=400), 1.0),
    "hot pixels above 1": (with_levels(photograph(1, np.float32), high=900.0, number=30), 1.0),
    "rounding above 255": (with_levels(photograph(255, np.float32), high=255.5, number=2_000), 255.0),
    "hot pixels of 32 bits in 16": (
        with_levels(photograph(65_535, np.int32), high=2**30, number=20),
        65_535.0,
    ),
    "8 bits in 32 with a hot pixel": (with_levels(photograph(255, np.int32), high=70_000, number=1), 255.0),
    "undershoot below 0": (with_levels(photograph(1, np.float32), high=-0.1, number=400), 1.0),
    "a dead pixel below 0": (with_levels(photograph(1, np.float32), high=-50.0, number=1), 1.0),
    "16 bits with a sign": (photograph(2**15 - 1, np.int16), 2.0**15 - 1),
    "32 bits without a sign": (photograph(2**32 - 1, np.uint32), 2.0**32 - 1),
}


@pytest.mark.parametrize("name", OVERSHOOT)
def test_I29_white_is_the_level_of_the_distribution_and_single_levels_are_clipped(name: str) -> None:
    levels, white = OVERSHOOT[name]
    expected = np.floor((levels.astype(float) / white).clip(0, 1) * 255 + 0.5)
    data = grey_tiff(levels)
    np.testing.assert_array_equal(decoded(data)[..., 0], expected)
    assert first_levels(data)[1] == "levels"


USUAL = {
    "from 0 to 1": photograph(1, np.float32),
    "dark": photograph(0.02, np.float32),
    "from 0 to 255": photograph(255, np.float32),
    "16 bits in 32": photograph(65_535, np.int32),
    "32 bits": photograph(2**31 - 1, np.int32),
    "from -1 to 1": np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64),
    "elevation": np.linspace(-412, 8848, 4096, dtype=np.float32).reshape(64, 64),
    "black": np.zeros((8, 8), np.float32),
    "a mask of a small object": np.pad(np.full((2, 2), 255, np.int32), 40),
}


@pytest.mark.parametrize("name", USUAL)
def test_I29_images_without_single_extreme_levels_are_decoded_as_before(name: str) -> None:
    """The rule of 0.3.0: the smallest usual white that no level exceeds; stretched if a level is negative."""
    levels = USUAL[name].astype(float)
    low, high = min(levels.min(), 0.0), levels.max()
    white = high if low < 0 else next(each for each in (1, 255, 65_535, 2**31 - 1) if high <= each)
    expected = np.floor((levels - low) * (255 / (white - low)) + 0.5)
    data = grey_tiff(USUAL[name])
    np.testing.assert_array_equal(decoded(data)[..., 0], expected)
    assert first_levels(data)[1] is None


def test_I29_white_that_a_tiff_states_is_used() -> None:
    levels = np.array([[0.5, 2.0, 3.5, 9.0]], np.float32)
    data = grey_tiff(levels, levels_from_to=(0.5, 3.5))
    assert first_levels(data) == ([0, 128, 255, 255], "levels")
    of_10_bits = grey_tiff(np.array([[0, 1023, 512]], np.int32), levels_from_to=(0, 1023))
    assert first_levels(of_10_bits) == ([0, 255, 128], "levels")
    of_the_type = grey_tiff(photograph(255, np.float32), levels_from_to=(0, 3.4e38))
    assert (decoded(of_the_type) == decoded(grey_tiff(photograph(255, np.float32)))).all()
    inverted = grey_tiff(levels, levels_from_to=(0.5, 3.5), white_is_zero=True)
    assert first_levels(inverted) == ([255, 128, 0, 0], "levels white_is_zero")


@pytest.mark.parametrize(
    "levels",
    [
        photograph(4, np.float32),
        photograph(2_000, np.float32),
        photograph(1_023, np.int32),
        photograph(16_383, np.int32),
        photograph(2**24, np.int32),
        photograph(3e9, np.float32),
        np.array([[0, 1, 2]], np.int32),
    ],
    ids=["light of a scene", "depth", "10 bits in 32", "14 bits in 32", "24 bits in 32", "counts", "classes"],
)
def test_I29_levels_that_suit_no_usual_white_are_rejected_by_name(levels: npt.NDArray[np.generic]) -> None:
    with pytest.raises(ImageError, match="range_unknown") as caught:
        decoded(grey_tiff(levels))
    assert f"{np.quantile(levels[levels > 0], 0.99, method='nearest'):.6g}" in caught.value.detail
    assert "from 0 (black) to 1 (white)" in str(caught.value.fix)
