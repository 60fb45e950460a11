"""Measures of a picture's detail, exposure, bars, corners and JPEG quality."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter
from skimage import data

from pipeline.images.decode import DecodeLimits, decoded
from pipeline.images.pixel_measures import (
    CORNER_HW,
    Views,
    bars,
    brightest,
    colours,
    contrast,
    corners,
    detail_px,
    jpeg_quality,
    signs_of_corners,
    white,
)

ASTRONAUT = Image.fromarray(data.astronaut())
PHOTOS = [ASTRONAUT, *(Image.fromarray(photo) for photo in (data.coffee(), data.cat(), data.rocket()))]


def detail_of(image: Image.Image) -> float:
    value = detail_px(Views(image))
    assert value is not None
    return value


def edge_px(image: Image.Image) -> float:
    return (image.width * image.height) ** 0.5


@pytest.mark.parametrize("photo", PHOTOS, ids=lambda photo: str(photo.size))
def test_an_enlarged_photograph_has_about_the_detail_of_the_small_one(photo: Image.Image) -> None:
    assert detail_of(photo) == edge_px(photo), "a sharp photograph has detail up to the pixel"
    for factor in (2, 3, 4):
        small = photo.resize((photo.width // factor, photo.height // factor), Image.Resampling.LANCZOS)
        enlarged = small.resize(photo.size, Image.Resampling.BICUBIC)
        assert detail_of(enlarged) / edge_px(small) == pytest.approx(1.4, abs=0.5)


def test_blur_lowers_the_detail_but_a_blurred_background_does_not() -> None:
    blurred = [detail_of(ASTRONAUT.filter(ImageFilter.GaussianBlur(sigma))) for sigma in (2, 4, 8)]
    assert blurred == sorted(blurred, reverse=True)
    assert blurred[0] < 0.5 * edge_px(ASTRONAUT)

    background = ASTRONAUT.filter(ImageFilter.GaussianBlur(8))
    box = (150, 20, 320, 200)  # a third of each edge, with the face
    background.paste(ASTRONAUT.crop(box), box)
    assert detail_of(background) > 0.7 * edge_px(ASTRONAUT)


def test_the_worse_direction_counts_because_a_shaken_photograph_is_sharp_in_the_other_one() -> None:
    for axis in (0, 1):
        pixels = np.asarray(ASTRONAUT, dtype=np.float64)
        shaken = np.mean([np.roll(pixels, shift, axis) for shift in range(8)], axis=0)
        assert detail_of(Image.fromarray(shaken.astype(np.uint8))) < 0.4 * edge_px(ASTRONAUT)


def test_a_large_photograph_is_measured_at_a_reduced_size() -> None:
    large = ASTRONAUT.resize((2600, 2600), Image.Resampling.BICUBIC)
    assert detail_of(large) == pytest.approx(512, rel=0.5)
    noise = np.random.default_rng(0).integers(0, 256, (2200, 2200, 3), dtype=np.uint8)
    assert detail_of(Image.fromarray(noise)) == 2200


def test_images_without_structure_or_almost_without_pixels_have_no_detail_to_measure() -> None:
    assert detail_px(Views(Image.new("RGB", (300, 200), (9, 90, 200)))) is None
    assert detail_px(Views(ASTRONAUT.resize((200, 31)))) is None


def test_exposure_equals_percentiles_of_the_brightness() -> None:
    for photo in PHOTOS:
        # The measures sample every n-th pixel.
        views, grey = Views(photo), np.asarray(photo.convert("L"))
        low, high = np.percentile(np.asarray(photo), [1, 99], axis=(0, 1))
        assert brightest(views) * 255 == pytest.approx(high.max(), abs=2)
        assert contrast(views) == pytest.approx(((high - low) / (high + low)).max(), abs=0.05)
        assert white(views) == pytest.approx((grey >= 250).mean(), abs=0.005)


def test_a_white_area_counts_unless_it_is_drawn() -> None:
    """A shape on white has a short edge, and no nearly white tones around it as a white sky has."""
    on_white = Image.new("RGB", (400, 300), "white")
    on_white.paste(ASTRONAUT.resize((200, 160)), (100, 70))
    cross = Image.new("RGB", (64, 64), (250, 253, 251))
    ImageDraw.Draw(cross).line((32, 8, 32, 56), fill=(142, 68, 173), width=12)
    ImageDraw.Draw(cross).line((8, 32, 56, 32), fill=(142, 68, 173), width=12)
    assert white(Views(on_white)) == white(Views(cross)) == 0

    levels = np.clip(np.linspace(60, 360, 300), 0, 255)
    sky = Image.fromarray(np.repeat(levels, 400).reshape(300, 400).astype(np.uint8)).convert("RGB")
    assert white(Views(sky)) == pytest.approx((levels >= 250).mean(), abs=0.01)
    for photo in PHOTOS:
        blown = photo.point([min(255, 2 * level) for level in range(256)] * 3)
        grey = np.asarray(blown.convert("L"))
        assert white(Views(blown)) == pytest.approx((grey >= 250).mean(), abs=0.02)


def test_colours_of_the_same_brightness_have_contrast_and_detail() -> None:
    image = Image.new("RGB", (200, 150), (250, 180, 200))
    ImageDraw.Draw(image).rectangle((60, 40, 140, 110), fill=(250, 211, 60))
    assert contrast(Views(image)) > 0.5
    assert detail_of(image) == edge_px(image)


def test_colours_are_means_of_parts_in_the_order_of_reading() -> None:
    image = Image.new("RGB", (400, 200), "black")
    image.paste((255, 128, 0), (0, 0, 100, 50))
    image.paste((0, 0, 255), (300, 150, 400, 200))
    assert colours(Views(image)) == "ff8000" + "000000" * 14 + "0000ff"


@pytest.mark.parametrize("level", [128, 255])
@pytest.mark.parametrize(
    "box", [(0, 0, 512, 40), (0, 472, 512, 512), (0, 0, 40, 512), (472, 0, 512, 512)], ids=str
)
def test_a_bar_at_an_edge_is_measured(level: int, box: tuple[int, int, int, int]) -> None:
    framed = ASTRONAUT.copy()
    framed.paste((level,) * 3, box)
    assert bars(Views(framed)) == pytest.approx(40 / 512, abs=0.005)


def test_photographs_and_subjects_on_plain_backgrounds_have_no_bars() -> None:
    on_white = Image.new("RGB", (400, 300), "white")
    ImageDraw.Draw(on_white).rectangle((42, 40, 358, 260), fill=(40, 90, 160))
    sky = Image.fromarray(np.repeat(np.linspace(60, 200, 300), 400).reshape(300, 400).astype(np.uint8))
    for image in (*PHOTOS, on_white, sky.convert("RGB"), Image.new("RGB", (50, 40))):
        assert bars(Views(image)) == 0


def test_the_print_of_a_corner_shows_a_mark_in_it() -> None:
    image = Image.new("RGB", (384, 256), (100, 100, 100))
    ImageDraw.Draw(image).rectangle((384 - 40, 256 - 24, 384 - 17, 256 - 13), fill="white")
    text = corners(Views(image))
    assert text is not None
    signs = signs_of_corners(text)
    assert signs.shape == (4, *CORNER_HW)
    assert not signs[:3].any()
    # A cell has 4 pixels.
    assert (signs[3, 16 - 6 : 16 - 3, 24 - 10 : 24 - 4] == 1).all()
    assert signs[3].min() == -1, "cells around the mark are darker than their neighbourhood"


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_quality_of_a_jpeg_is_read_from_its_quantization(mode: str) -> None:
    for quality in (1, 5, 10, 25, 49, 50, 51, 75, 90, 95, 100):
        file = io.BytesIO()
        exif = Image.Exif()
        exif[274] = 6  # rotated, so that decoding creates another image
        ASTRONAUT.convert(mode).save(file, "JPEG", quality=quality, exif=exif)
        with decoded(io.BytesIO(file.getvalue()), (255, 255, 255), limits=DecodeLimits()) as image:
            assert jpeg_quality(Views(image)) == quality
    assert jpeg_quality(Views(ASTRONAUT)) is None
