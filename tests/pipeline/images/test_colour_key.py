"""The transparent colour of a PNG, in every depth (FAILURES I31)."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image

from pipeline.images.decode import DecodeLimits, decoded, decoding_of
from pipeline.images.mask import read_mask
from tests.pipeline.pixels import saved, stored_png
from tests.profiles import gamma_curve, grey_profile, srgb_encoded

BACKGROUND = (9, 8, 7)


def shown(data: bytes) -> tuple[list[list[int]], str | None]:
    """Return the first row of pixels, and the decoding rules."""
    rules: list[str] = []
    with decoded(io.BytesIO(data), BACKGROUND, limits=DecodeLimits(), rules=rules) as image:
        return np.asarray(image)[0].tolist(), decoding_of(rules)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_I31_each_level_of_each_depth_of_grey_can_be_the_transparent_one(bits: int) -> None:
    highest = 2**bits - 1
    levels = np.unique(np.linspace(0, highest, 16).astype(np.int64)).repeat(8)
    for key in np.unique(levels):
        pixels, rules = shown(stored_png(levels[None], bits, (b"tRNS", struct.pack(">H", key))))
        grey = np.floor(levels * 255 / highest + 0.5).astype(int)
        expected = [
            [*BACKGROUND] if level == key else [value] * 3 for level, value in zip(levels, grey, strict=True)
        ]
        assert pixels == expected, f"{bits} bits, level {key} is transparent"
        assert rules == ("colour_key" if bits in {2, 4} and key else None)


def test_I31_a_transparent_level_that_no_pixel_has_changes_nothing() -> None:
    levels = np.zeros((1, 8), np.int64)
    data = stored_png(levels, 4, (b"tRNS", struct.pack(">H", 3)))
    assert shown(data) == ([[0, 0, 0]] * 8, None)


def test_I31_a_transparent_colour_of_16_bits_is_compared_in_16_bits() -> None:
    """All four colours have the upper bytes of the transparent one, and one has its lower bytes too."""
    key = (0x1234, 0x5678, 0x9ABC)
    colours = [key, (0x1235, 0x5678, 0x9ABC), (0x1234, 0x5679, 0x9ABC), (0x1234, 0x5678, 0x9ABB)]
    data = stored_png(np.array([colours], np.int64), 16, (b"tRNS", struct.pack(">HHH", *key)))
    assert shown(data) == ([[*BACKGROUND], *[[0x12, 0x56, 0x9A]] * 3], "colour_key")


@pytest.mark.parametrize("height", [1, 300])
def test_I31_colours_of_16_bits_that_0_3_0_compared_rightly_have_no_rule(height: int) -> None:
    colours = np.array([[(0x1212, 0x5656, 0x9A9A), (0xFFFF, 0, 0x0101)]], np.int64).repeat(height, axis=0)
    data = stored_png(colours, 16, (b"tRNS", struct.pack(">HHH", 0x1212, 0x5656, 0x9A9A)))
    assert shown(data) == ([[*BACKGROUND], [255, 0, 1]], None)


def test_I31_an_rgb_image_with_a_transparent_colour_keeps_all_other_colours() -> None:
    colours = np.array([[(1, 2, 3), (250, 10, 20), (3, 2, 1), (0, 200, 90)]], np.uint8)
    pixels, rules = shown(saved(Image.fromarray(colours), transparency=(1, 2, 3)))
    assert (pixels, rules) == ([[*BACKGROUND], *colours[0, 1:].tolist()], None)


def test_I31_a_grey_image_with_a_transparent_level_keeps_its_grey_profile() -> None:
    levels = np.array([[0, 100, 200]], np.uint8)
    data = saved(Image.fromarray(levels), transparency=0, icc_profile=grey_profile(gamma_curve(1.0)))
    (first, *others), _ = shown(data)
    assert first == [*BACKGROUND]
    np.testing.assert_allclose(others, srgb_encoded(levels[0, 1:, None] / 255) * np.full(3, 255), atol=1)


@pytest.mark.parametrize(
    ("bits", "key", "rules"),
    [(1, 1, None), (2, 1, "colour_key"), (4, 9, "colour_key"), (8, 77, None), (16, 500, None)],
)
def test_I31_the_opacity_of_a_grey_image_is_a_mask(bits: int, key: int, rules: str | None) -> None:
    levels = np.zeros((4, 8), np.int64)
    levels[:, :2] = key
    data = stored_png(levels, bits, (b"tRNS", struct.pack(">H", key)))
    content = read_mask(io.BytesIO(data), "alpha", limits=DecodeLimits())
    assert (content.mean, content.decoding) == (0.75, rules)


def test_I31_the_opacity_of_an_rgb_image_of_16_bits_is_a_mask() -> None:
    colours = np.full((4, 8, 3), 0x1234, np.int64)
    colours[0] += 1
    data = stored_png(colours, 16, (b"tRNS", struct.pack(">HHH", *[0x1234] * 3)))
    content = read_mask(io.BytesIO(data), "alpha", limits=DecodeLimits())
    assert (content.mean, content.decoding) == (0.25, "colour_key")
