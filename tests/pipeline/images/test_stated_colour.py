"""Colour that a file states without an ICC profile is converted, or the image is rejected by name (I30)."""

from __future__ import annotations

import io
import struct

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageCms

from pipeline.images.decode import DecodeLimits, decode_cost, decoded, decoding_of, read_header
from pipeline.images.formats import ImageError, has_plugin
from pipeline.images.mask import read_mask
from pipeline.images.stated_colour import stated_profile
from tests.pipeline.pixels import WHITE, saved, stored_png
from tests.profiles import (
    DISPLAY_P3,
    SRGB,
    WHITE_D65,
    gamma_curve,
    matrix_profile,
    srgb_encoded,
    srgb_of_p3,
    to_xyz,
)

LEVELS = np.linspace(0, 255, 9).round().astype(np.uint8)
GRID = np.stack(np.meshgrid(LEVELS, LEVELS, LEVELS), axis=-1).reshape(9, 81, 3)
"""A regular grid of colours."""

BT2020 = ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046))
ADOBE_RGB = ((0.64, 0.33), (0.21, 0.71), (0.15, 0.06))


def gama(value: int) -> tuple[bytes, bytes]:
    return b"gAMA", struct.pack(">I", value)


def chrm(primaries: tuple[tuple[float, float], ...]) -> tuple[bytes, bytes]:
    values = (number for pair in (WHITE_D65, *primaries) for number in pair)
    return b"cHRM", struct.pack(">8I", *(round(value * 100_000) for value in values))


def cicp(primaries: int, transfer: int, matrix: int = 0, is_full_range: int = 1) -> tuple[bytes, bytes]:
    return b"cICP", bytes([primaries, transfer, matrix, is_full_range])


def shown(data: bytes) -> tuple[npt.NDArray[np.int64], str | None]:
    rules: list[str] = []
    with decoded(io.BytesIO(data), WHITE, limits=DecodeLimits(), rules=rules) as image:
        return np.asarray(image).astype(np.int64), decoding_of(rules)


def in_srgb(primaries: tuple[tuple[float, float], ...], exponent: float | None) -> npt.NDArray[np.float64]:
    """Return `GRID`, which is in these primaries and has this exponent or sRGB's curve, as sRGB levels."""
    levels = GRID / 255.0
    curve = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
    light = curve if exponent is None else levels**exponent
    linear = light @ (np.linalg.inv(to_xyz(SRGB)) @ to_xyz(primaries)).T
    return srgb_encoded(linear.clip(0, 1)) * 255


CONVERTED = {
    "linear light": ([gama(100_000)], in_srgb(SRGB, 1.0)),
    "gamma of old Macs": ([gama(55_556)], in_srgb(SRGB, 1.8)),
    "gamma 2.6": ([gama(38_462)], in_srgb(SRGB, 2.6)),
    "Adobe RGB": ([gama(45_455), chrm(ADOBE_RGB)], in_srgb(ADOBE_RGB, None)),
    "Display P3 without gamma": ([chrm(DISPLAY_P3)], in_srgb(DISPLAY_P3, None)),
    "linear P3": ([gama(100_000), chrm(DISPLAY_P3)], in_srgb(DISPLAY_P3, 1.0)),
    "P3 by code points": ([cicp(12, 13)], in_srgb(DISPLAY_P3, None)),
    "linear light by code points": ([cicp(1, 8)], in_srgb(SRGB, 1.0)),
    "BT.2020 by code points": ([cicp(9, 14)], in_srgb(BT2020, None)),
    "gamma 2.2 by code points": ([cicp(1, 4)], in_srgb(SRGB, 2.2)),
    "code points before gamma": ([gama(100_000), cicp(12, 13)], in_srgb(DISPLAY_P3, None)),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_I30_the_colour_that_chunks_of_a_png_state_is_converted(name: str) -> None:
    chunks, expected = CONVERTED[name]
    data = stored_png(GRID, 8, *chunks)
    pixels, rules = shown(data)
    assert np.abs(pixels - expected).max() <= 1.5
    assert np.abs(GRID - expected).max() > 5, "the stored numbers are other colours"
    assert rules == "stated_colour"
    assert read_header(data).notes == ("colour_profile",)


def test_the_arithmetic_of_this_file_is_that_of_display_p3() -> None:
    assert np.abs(in_srgb(DISPLAY_P3, None) - srgb_of_p3(GRID)).max() <= 0.5


SRGB_PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()

UNCHANGED = {
    "no chunk": [],
    "gamma of sRGB": [gama(45_455)],
    "gamma of sRGB, rounded": [gama(45_000)],
    "gamma and primaries of sRGB": [gama(45_455), chrm(SRGB)],
    "sRGB before gamma": [(b"sRGB", b"\0"), gama(100_000), chrm(DISPLAY_P3)],
    "code points of sRGB": [cicp(1, 13)],
    "code points of BT.709": [cicp(1, 1)],
    "unspecified code points": [cicp(2, 2)],
    "no gamma": [gama(0)],
    "no primaries": [(b"cHRM", bytes(32))],
    "primaries on a line": [chrm(((0.1, 0.1), (0.2, 0.2), (0.3, 0.3)))],
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_I30_images_that_state_srgb_or_nothing_usable_are_decoded_as_before(name: str) -> None:
    data = stored_png(GRID, 8, *UNCHANGED[name])
    pixels, rules = shown(data)
    assert (pixels == GRID).all()
    assert rules is None
    assert read_header(data).notes == ()


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "I;16"])
def test_I30_stated_colour_is_converted_in_every_mode(mode: str) -> None:
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    plain = saved(deep if mode == "I;16" else Image.fromarray(grey).convert(mode))
    pixels, rules = shown(plain[:33] + chunk(*gama(100_000)) + plain[33:])
    np.testing.assert_allclose(pixels[..., 0], srgb_encoded(grey / 255) * 255, atol=1.5)
    assert rules == "stated_colour"


def chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk as it is stored; the header chunk ends at byte 33 of a PNG."""
    png = stored_png(np.zeros((1, 1), np.int64), 8, (name, data))
    return png[33 : 33 + 12 + len(data)]


def test_I30_an_icc_profile_precedes_gamma_and_code_points_precede_a_profile() -> None:
    profile = matrix_profile(SRGB, gamma_curve(1.8))
    plain = saved(Image.fromarray(GRID), icc_profile=profile)
    with_profile, rules = shown(plain)
    assert rules is None
    pixels, rules = shown(plain[:33] + chunk(*gama(100_000)) + plain[33:])
    assert (pixels == with_profile).all()
    assert rules is None
    pixels, rules = shown(plain[:33] + chunk(*cicp(1, 13)) + plain[33:])
    assert (pixels == GRID).all()
    assert rules == "stated_colour", "0.3.0 converted the profile"


REJECTED = {
    "PQ": (cicp(9, 16), "hdr_colour", "PQ"),
    "HLG": (cicp(9, 18), "hdr_colour", "HLG"),
    "logarithmic": (cicp(1, 9), "colour_unknown", "transfer 9"),
    "CIE XYZ": (cicp(10, 13), "colour_unknown", "primaries 10"),
    "range of video": (cicp(1, 13, 0, 0), "colour_unknown", "range 0"),
    "matrix of video": (cicp(1, 13, 6), "colour_unknown", "matrix 6"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_I30_colour_that_cannot_be_converted_is_rejected_by_name(name: str) -> None:
    stated, reason, detail = REJECTED[name]
    data = stored_png(GRID, 8, stated)
    with pytest.raises(ImageError) as caught:
        shown(data)
    assert caught.value.reason == reason
    assert detail in caught.value.detail

    # The scan still lists it, and plans its memory.
    assert read_header(data).size == (9, 81)
    assert decode_cost(io.BytesIO(data), limits=DecodeLimits()).passes_px == 9 * 81


def test_I33_stated_colour_does_not_change_a_mask() -> None:
    grey = np.arange(256, dtype=np.int64).reshape(16, 16)
    plain = read_mask(io.BytesIO(stored_png(grey, 8)), "file", limits=DecodeLimits())
    for stated in (gama(100_000), cicp(1, 8), cicp(9, 16)):
        content = io.BytesIO(stored_png(grey, 8, stated))
        assert read_mask(content, "file", limits=DecodeLimits()) == plain


def avif(primaries: int, transfer: int) -> bytes:
    """Return `GRID` as an AVIF that states these code points; Pillow writes those of sRGB."""
    data = saved(Image.fromarray(GRID), "AVIF", quality=100, subsampling="4:4:4")
    assert data.count(b"nclx") == 1
    position = data.index(b"nclx") + 4
    return data[:position] + struct.pack(">HH", primaries, transfer) + data[position + 4 :]


def heif(primaries: int, transfer: int) -> bytes:
    pytest.importorskip("pillow_heif")
    assert has_plugin("HEIF")
    code_points = {"color_primaries": primaries, "transfer_characteristics": transfer}
    full = {"matrix_coefficients": 6, "full_range_flag": 1}
    return saved(Image.fromarray(GRID), "HEIF", quality=100, chroma=444, **code_points, **full)


@pytest.mark.parametrize("write", [avif, heif])
@pytest.mark.parametrize(
    ("primaries", "transfer", "expected"),
    [(12, 13, in_srgb(DISPLAY_P3, None)), (9, 1, in_srgb(BT2020, None)), (1, 8, in_srgb(SRGB, 1.0))],
    ids=["P3", "BT.2020", "linear"],
)
def test_I30_the_code_points_of_heif_and_avif_are_converted(
    write, primaries: int, transfer: int, expected: npt.NDArray[np.float64]
) -> None:
    data = write(primaries, transfer)
    pixels, rules = shown(data)

    # Both codecs are lossy; the error of a dark level grows in linear light.
    assert np.abs(pixels - expected).mean() < (1 if transfer != 8 else 3)
    assert np.abs(GRID - expected).mean() > 5
    assert rules == "stated_colour"
    assert read_header(data).notes == ("colour_profile",)


@pytest.mark.parametrize("write", [avif, heif])
def test_I30_heif_and_avif_that_state_srgb_are_decoded_as_before(write) -> None:
    for code_points in ((1, 13), (2, 2), (1, 1)):
        pixels, rules = shown(write(*code_points))
        assert np.abs(pixels - GRID).mean() < 1
        assert rules is None


@pytest.mark.parametrize("write", [avif, heif])
def test_I30_hdr_heif_and_avif_are_rejected_by_name(write) -> None:
    for transfer, name in ((16, "PQ"), (18, "HLG")):
        with pytest.raises(ImageError, match=f"hdr_colour.*{name}"):
            shown(write(9, transfer))


def test_I30_a_profile_in_an_avif_precedes_its_code_points() -> None:
    profile = matrix_profile(DISPLAY_P3, gamma_curve(2.2))
    data = saved(Image.fromarray(GRID), "AVIF", quality=100, subsampling="4:4:4", icc_profile=profile)
    pixels, rules = shown(data)
    assert np.abs(pixels - in_srgb(DISPLAY_P3, 2.2)).mean() < 1
    assert rules is None


def test_I30_damaged_boxes_of_an_avif_state_no_colour() -> None:
    data = avif(12, 13)
    with Image.open(io.BytesIO(data)) as image:
        assert stated_profile(image, io.BytesIO(data)) is not None
        for box in (b"meta", b"iprp", b"ipco", b"ipma", b"pitm"):
            position = data.index(box)
            for damaged in (data[: position + 5], data[: position - 4] + bytes(4) + data[position:]):
                file = io.BytesIO(damaged)
                file.seek(7)
                assert stated_profile(image, file) is None
                assert file.tell() == 7
