"""Every way to store a colour converts to sRGB as independent arithmetic predicts."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageCms

from pipeline.images.colour import to_srgb
from pipeline.images.decode import decode, read_header
from pipeline.images.formats import ImageError
from tests.pipeline.pixels import WHITE, Pixels, decoded, pattern, saved
from tests.profiles import (
    DISPLAY_P3,
    SRGB,
    cmyk_profile,
    gamma_curve,
    grey_profile,
    matrix_profile,
    srgb_curve,
    srgb_encoded,
    srgb_of_p3,
)


@pytest.mark.parametrize("mode", ["L", "P", "1", "YCbCr", "CMYK", "LA", "RGBA"])
def test_I11_every_common_mode_becomes_rgb(mode: str) -> None:
    data = saved(Image.fromarray(pattern()).convert(mode), "TIFF" if mode in {"YCbCr", "CMYK"} else "PNG")
    with Image.open(io.BytesIO(data)) as opened:
        expected = np.asarray(opened.convert("RGB")).astype(np.int64)
    assert (decoded(data) == expected).all()


@pytest.mark.parametrize("mode", ["PA", "RGBa", "La", "HSV", "LAB"])
def test_I11_rare_modes_become_rgb(mode: str) -> None:
    if mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        grey = Image.fromarray(pattern()).convert("L").convert("RGB")
        image = ImageCms.profileToProfile(grey, srgb, lab, outputMode="LAB")
        assert image is not None
    else:
        through = {"PA": "P", "RGBa": "RGBA", "La": "LA"}.get(mode, "RGB")
        image = Image.fromarray(pattern()).convert(through).convert(mode)
        grey = image.convert({"La": "LA", "RGBa": "RGBA"}.get(mode, "RGB")).convert("RGB")
    pixels = np.asarray(to_srgb(image, WHITE)).astype(np.int64)
    assert np.abs(pixels - np.asarray(grey)).max() <= 3


def test_I11_16_bit_grey_is_scaled_and_not_clipped() -> None:
    levels = np.linspace(0, 65535, 960).astype(np.uint16).reshape(24, 40)
    expected = np.floor(levels.astype(np.float64) / 257 + 0.5)
    for kind in ("PNG", "TIFF"):
        pixels = decoded(saved(Image.fromarray(levels), kind))
        assert (pixels == expected[..., None]).all()


@pytest.mark.parametrize(
    ("levels", "white"),
    [
        (np.linspace(0, 1, 960, dtype=np.float32), 1.0),
        (np.linspace(0.25, 255, 960, dtype=np.float32), 1.0),
        (np.linspace(0, 65535, 960).astype(np.int32), 65535.0),
        (np.linspace(0, 2**31 - 1, 960).astype(np.int32), 2.0**31 - 1),
    ],
    ids=["fractions", "float levels", "16 bits in 32", "32 bits"],
)
def test_I11_float_and_32_bit_levels_are_scaled(levels: npt.NDArray[np.float32], white: float) -> None:
    white = 255.0 if levels.max() == 255 else white
    pixels = decoded(saved(Image.fromarray(levels.reshape(24, 40)), "TIFF"))
    expected = np.floor(levels.astype(np.float64).reshape(24, 40) / white * 255 + 0.5)
    assert (pixels[..., 0] == expected).all()


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([0, 1, 1], [0, 255, 255]),
        ([0, 128, 255], [0, 128, 255]),
        ([0, 256, 65_535], [0, 1, 255]),
        ([0, 65_536, 2**31 - 1], [0, 0, 255]),
        ([0, 2**30, 2**31 - 1], [0, 128, 255]),
        ([-5, 0, 5], [0, 128, 255]),
        ([-3, -3, -3], [0, 0, 0]),
        ([-2, -2, -1], [0, 0, 255]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_I11_white_is_the_smallest_usual_level_that_suits(
    dtype: type[np.number], levels: list[int], expected: list[int]
) -> None:
    image = Image.fromarray(np.array([levels], dtype=dtype))
    pixels = np.asarray(to_srgb(image, WHITE))
    assert pixels[0].tolist() == [[level] * 3 for level in expected]


def test_I11_levels_that_are_not_finite_are_rejected() -> None:
    levels = np.full((4, 4), np.nan, dtype=np.float32)
    with pytest.raises(ImageError, match="finite numbers"):
        decode(saved(Image.fromarray(levels), "TIFF"), WHITE)


def blended(colours: Pixels, alpha: npt.NDArray[np.float64], background: tuple[int, int, int]) -> Pixels:
    share = alpha[..., None] / 255
    return (colours * share + np.array(background) * (1 - share)).round().astype(np.uint8)


def test_I10_the_background_shows_through_transparency() -> None:
    alpha = np.tile(np.linspace(0, 255, 40), (24, 1)).round()
    rgba = np.dstack([pattern(), alpha]).astype(np.uint8)
    pixels = decoded(saved(Image.fromarray(rgba, "RGBA")), (10, 200, 30))
    assert np.abs(pixels - blended(pattern(), alpha, (10, 200, 30))).max() <= 1
    assert (pixels[:, 0] == (10, 200, 30)).all()
    assert (pixels[:, -1] == pattern()[:, -1]).all()


def test_I10_the_least_transparency_shows_the_background() -> None:
    image = Image.fromarray(np.array([[(255, 255, 255, 254), (255, 255, 255, 255)]], dtype=np.uint8))
    assert decoded(saved(image), (0, 0, 0)).tolist() == [[[254] * 3, [255] * 3]]


def test_I10_the_background_shows_through_grey_with_alpha_and_transparent_colours() -> None:
    alpha = np.tile(np.linspace(0, 255, 40), (24, 1)).round()
    grey = np.dstack([pattern()[..., 0], alpha]).astype(np.uint8)
    pixels = decoded(saved(Image.fromarray(grey, "LA")), (10, 200, 30))
    colours = np.repeat(grey[..., :1], 3, axis=-1)
    assert np.abs(pixels - blended(colours, alpha, (10, 200, 30))).max() <= 1

    keyed = np.zeros((2, 2, 3), np.uint8)
    keyed[0, 0] = (1, 2, 3)
    pixels = decoded(saved(Image.fromarray(keyed), transparency=(1, 2, 3)), (10, 200, 30))
    assert pixels[0, 0].tolist() == [10, 200, 30]
    assert pixels[1, 1].tolist() == [0, 0, 0]


def test_I10_the_background_shows_through_transparent_palettes() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    assert decoded(saved(image, transparency=0), (9, 8, 7)).tolist() == [[[9, 8, 7], [0, 0, 255]]]
    some = saved(image, transparency=bytes([51, 255]))
    assert np.abs(decoded(some, (0, 0, 0)) - [[[51, 0, 0], [0, 0, 255]]]).max() <= 1


@pytest.mark.parametrize(
    ("mode", "transparent", "shown"),
    [
        ("1", 0, [[9, 8, 7], [255, 255, 255]]),
        ("1", 255, [[0, 0, 0], [9, 8, 7]]),
        ("L", 0, [[9, 8, 7], [255, 255, 255]]),
        ("L", 255, [[0, 0, 0], [9, 8, 7]]),
        ("RGB", (0, 0, 0), [[9, 8, 7], [255, 255, 255]]),
        ("RGB", (255, 255, 255), [[0, 0, 0], [9, 8, 7]]),
    ],
    ids=[f"{colour} in mode {mode}" for mode in ("1", "L", "RGB") for colour in ("black", "white")],
)
def test_I10_the_background_shows_through_the_transparent_colour_of_every_mode(
    mode: str, transparent: int | tuple[int, ...], shown: list[list[int]]
) -> None:
    image = Image.fromarray(np.array([[0, 255]], dtype=np.uint8)).convert(mode)
    pixels = decoded(saved(image, transparency=transparent), (9, 8, 7)).tolist()
    assert pixels == [shown], f"mode {mode}: {transparent} is transparent, and the background is 9, 8, 7"


def test_I10_the_background_shows_through_the_transparent_level_of_16_bit_grey() -> None:
    levels = np.array([[0, 257, 65535]], dtype=np.uint16)
    pixels = decoded(saved(Image.fromarray(levels), transparency=257), (9, 8, 7))
    assert pixels.tolist() == [[[0, 0, 0], [9, 8, 7], [255, 255, 255]]]


def gamma_profile(gamma: float) -> bytes:
    return matrix_profile(SRGB, gamma_curve(gamma))


def test_I12_a_gamma_profile_is_converted_to_srgb() -> None:
    """In a gamma 1.8 profile, linear light is level ** 1.8; the sRGB curve encodes it again."""
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    data = saved(Image.fromarray(np.dstack([levels] * 3)), icc_profile=gamma_profile(1.8))
    light = (levels / 255.0) ** (round(1.8 * 256) / 256)
    assert np.abs(decoded(data) - (srgb_encoded(light) * 255)[..., None]).max() <= 1.5
    assert read_header(data).notes == ("colour_profile",)


def test_I12_a_grey_profile_is_converted_to_srgb_and_does_not_fit_colours() -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    profile = grey_profile(gamma_curve(1.8))
    light = (levels / 255.0) ** (round(1.8 * 256) / 256)
    converted = decoded(saved(Image.fromarray(levels), icc_profile=profile))
    assert np.abs(converted - (srgb_encoded(light) * 255)[..., None]).max() <= 1.5
    assert np.abs(converted[..., 0].astype(int) - levels).max() > 10, "the profile changes levels"
    assert (decoded(saved(Image.fromarray(pattern()), icc_profile=profile)) == pattern()).all()
    bilevel = saved(Image.fromarray(levels).convert("1"), icc_profile=profile)
    assert read_header(bilevel).notes == ("colour_profile",)


def test_I12_display_p3_is_converted_by_its_matrix() -> None:
    """A regular grid of 9 levels per channel, partly outside sRGB; the tolerance is one level of rounding."""
    levels = np.linspace(0, 255, 9).round().astype(np.uint8)
    grid = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(9, 81, 3)
    data = saved(Image.fromarray(grid), icc_profile=matrix_profile(DISPLAY_P3, srgb_curve()))
    expected = srgb_of_p3(grid)
    assert np.abs(decoded(data) - expected).max() <= 1
    assert np.abs(grid.astype(int) - expected).max() > 20, "the two spaces differ"


@pytest.mark.parametrize(("shift", "difference"), [(0.0004, 0), (0.0009, 2)])
def test_I12_a_profile_is_converted_if_it_changes_a_level_by_more_than_one(
    shift: float, difference: int
) -> None:
    """Another red primary changes saturated colours only: here by 1 and by 2 levels."""
    (red_x, red_y), *others = SRGB
    profile = matrix_profile(((red_x - shift, red_y), *others), srgb_curve())
    levels = np.linspace(0, 255, 17).round().astype(np.uint8)
    grid = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(17, 289, 3)
    data = saved(Image.fromarray(grid), icc_profile=profile)
    assert np.abs(decoded(data) - grid).max() == difference
    assert read_header(data).notes == (("colour_profile",) if difference else ())


def test_I12_an_srgb_profile_changes_nothing() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = saved(Image.fromarray(pattern()), icc_profile=profile)
    assert (decoded(data) == pattern()).all()
    assert read_header(data).notes == ()


@pytest.mark.parametrize("profile", [b"no profile", b"\0" * 200])
def test_I12_an_unusable_profile_is_ignored(profile: bytes) -> None:
    assert (decoded(saved(Image.fromarray(pattern()), icc_profile=profile)) == pattern()).all()


def test_I12_an_rgb_profile_fits_grey_images_but_not_cmyk() -> None:
    profile = gamma_profile(1.8)
    grey = pattern()[..., 0]
    colours = decoded(saved(Image.fromarray(np.dstack([grey] * 3)), icc_profile=profile))
    assert (decoded(saved(Image.fromarray(grey), icc_profile=profile)) == colours).all()
    assert (colours[12] != grey[12, :, None]).all()
    inks = Image.fromarray(pattern()).convert("CMYK")
    assert (decoded(saved(inks, "TIFF", icc_profile=profile)) == np.asarray(inks.convert("RGB"))).all()


def grey_inks() -> npt.NDArray[np.uint8]:
    """Return the lightness (2, 2, 2, 2) of all combinations of full inks, from black to white."""
    cyan, magenta, yellow, black = np.mgrid[0:2, 0:2, 0:2, 0:2]
    return (255 * (1 - (2 * cyan + 3 * magenta + yellow) / 6) * (1 - black)).astype(np.uint8)


def test_I12_a_cmyk_profile_is_converted_to_srgb() -> None:
    lightness = grey_inks()
    inks = np.moveaxis(np.mgrid[0:2, 0:2, 0:2, 0:2], 0, -1).astype(np.uint8) * 255
    image = Image.fromarray(inks.reshape(4, 4, 4), "CMYK")
    data = saved(image, "TIFF", icc_profile=cmyk_profile(lightness))

    level = lightness.reshape(4, 4) / 255.0 * 100  # CIE L*
    light = np.where(level > 8, ((level + 16) / 116) ** 3, level / 903.3)
    assert np.abs(decoded(data) - (srgb_encoded(light) * 255)[..., None]).max() <= 1.5
    assert read_header(data).notes == ("colour_profile",)


PROFILES = {
    "grey": grey_profile(gamma_curve(1.8)),
    "RGB": gamma_profile(1.8),
    "CMYK": cmyk_profile(grey_inks()),
    "sRGB": ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(),
    "unusable": b"no profile",
}
FITTING = {"grey": {"L", "LA", "1"}, "RGB": {"L", "LA", "P", "PA", "RGB", "RGBA", "1"}, "CMYK": {"CMYK"}}


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK"])
def test_I12_the_header_notes_a_profile_if_and_only_if_it_fits_the_mode_and_changes_pixels(
    mode: str, profile: str
) -> None:
    image = Image.fromarray(pattern()).convert("P" if mode == "PA" else mode).convert(mode)
    options = {"save_all": False} | ({"compression": "raw"} if mode == "PA" else {})
    kind = "TIFF" if mode in {"CMYK", "PA"} else "PNG"
    with_profile = saved(image, kind, icc_profile=PROFILES[profile], **options)
    is_noted = read_header(with_profile).notes == ("colour_profile",)
    changes = bool((decoded(with_profile) != decoded(saved(image, kind, **options))).any())
    assert is_noted == (mode in FITTING.get(profile, set()))
    assert changes == (is_noted and mode != "1")  # black and white are the same in both
