"""Files that are kept: every format, orientation, mode and name, with their expected pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image, ImageCms

from tests.corpus.drawing import (
    ALPHA,
    FORMATS,
    GREY,
    LOSSY,
    PATTERN,
    RGB,
    RGBA,
    Case,
    Pixels,
    grey3,
    of_format,
    over_white,
    put,
    saved,
)
from tests.profiles import DISPLAY_P3, matrix_profile, srgb_curve, srgb_of_p3


def plain() -> list[Case]:
    """Each format under each of its usual suffixes."""
    cases = [
        Case(f"plain/{kind}.{kind}", put(of_format(kind)), pixels=PATTERN, tolerance=LOSSY.get(kind, 0))
        for kind in FORMATS
    ]
    suffixes = {"JPG": "jpg", "jpeg": "jpg", "JPEG": "jpg", "jpe": "jpg", "jfif": "jpg"}
    suffixes |= {"PNG": "png", "apng": "png", "TIFF": "tif", "Tif": "tif", "DIB": "bmp", "WebP": "webp"}
    for index, (suffix, kind) in enumerate(suffixes.items()):
        cases.append(Case(f"plain/I07 {index}.{suffix}", put(of_format(kind))))
    return cases


def oriented() -> list[Case]:
    """I09: the eight EXIF orientations; array indexing gives the expected pixels."""
    upright = {
        1: PATTERN,
        2: PATTERN[:, ::-1],
        3: PATTERN[::-1, ::-1],
        4: PATTERN[::-1],
        5: PATTERN.swapaxes(0, 1),
        6: PATTERN[::-1].swapaxes(0, 1),
        7: PATTERN[::-1, ::-1].swapaxes(0, 1),
        8: PATTERN[:, ::-1].swapaxes(0, 1),
    }
    cases: list[Case] = []
    for value, expected in upright.items():
        exif = Image.Exif()
        exif[274] = value
        for suffix in ("png", "jpg", "webp", "tif"):
            kind, options = FORMATS[suffix]
            data = saved(RGB, kind, exif=exif.tobytes(), **options)
            name = f"oriented/I09 {suffix} {value}.{suffix}"
            cases.append(Case(name, put(data), pixels=expected, tolerance=LOSSY.get(suffix, 0)))
    return cases


Stored = list[tuple[str, bytes, Pixels, int]]
"""Name, bytes, expected pixels, and the largest difference of a pixel value."""


def modes() -> list[Case]:
    """I10, I11: every pixel format."""
    stored = [*grey(), *palettes(), *transparent(), *colours()]
    return [
        Case(f"modes/{name}", put(data), pixels=expected, tolerance=tolerance)
        for name, data, expected, tolerance in stored
    ]


def grey() -> Stored:
    """One channel with 1 to 32 bits."""
    bilevel = Image.fromarray(GREY > 100)
    levels = Image.fromarray(GREY)
    deep = Image.fromarray((GREY.astype(np.uint16) << 8) | GREY)
    integers = Image.fromarray(GREY.astype(np.int32) * 257)
    fractions = Image.fromarray((GREY / 255).astype(np.float32))
    return [
        ("I11 1.png", saved(bilevel, "PNG"), grey3((GREY > 100) * 255), 0),
        ("I11 1.bmp", saved(bilevel, "BMP"), grey3((GREY > 100) * 255), 0),
        ("I11 1.tif", saved(bilevel, "TIFF"), grey3((GREY > 100) * 255), 0),
        ("I11 L.png", saved(levels, "PNG"), grey3(GREY), 0),
        ("I11 L.jpg", saved(levels, "JPEG", quality=98), grey3(GREY), 6),
        ("I11 L.bmp", saved(levels, "BMP"), grey3(GREY), 0),
        ("I11 16 bit.png", saved(deep, "PNG"), grey3(GREY), 0),
        ("I11 16 bit.tif", saved(deep, "TIFF"), grey3(GREY), 0),
        ("I11 32 bit.tif", saved(integers, "TIFF"), grey3(GREY), 0),
        ("I11 float.tif", saved(fractions, "TIFF"), grey3(GREY), 0),
    ]


def palettes() -> Stored:
    """A palette of 64 colours, of which one may be transparent."""
    palette = RGB.quantize(64, dither=Image.Dither.NONE)
    opaque = np.asarray(palette.convert("RGB"))
    holes = np.where(np.asarray(palette) == 5, 0, 255)
    return [
        ("I11 P.png", saved(palette, "PNG"), opaque, 0),
        ("I11 P.gif", saved(palette, "GIF"), opaque, 0),
        ("I11 P.bmp", saved(palette, "BMP"), opaque, 0),
        ("I11 P.tif", saved(palette, "TIFF"), opaque, 0),
        ("I10 P hole.png", saved(palette, "PNG", transparency=5), over_white(opaque, holes), 0),
        ("I10 P hole.gif", saved(palette, "GIF", transparency=5), over_white(opaque, holes), 0),
    ]


def transparent() -> Stored:
    """An alpha channel, or one transparent colour."""
    grey_alpha = Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(ALPHA)])
    key = PATTERN[3, 4]
    keyed = np.where((key == PATTERN).all(axis=2), 0, 255)
    key_png = saved(RGB, "PNG", transparency=tuple(key.tolist()))
    return [
        ("I10 RGBA.png", saved(RGBA, "PNG"), over_white(PATTERN, ALPHA), 1),
        ("I10 RGBA.tif", saved(RGBA, "TIFF"), over_white(PATTERN, ALPHA), 1),
        ("I10 LA.png", saved(grey_alpha, "PNG"), over_white(grey3(GREY), ALPHA), 1),
        ("I10 colour key.png", key_png, over_white(PATTERN, keyed), 0),
    ]


def colours() -> Stored:
    """Other colour models and JPEG encodings."""
    cmyk = Image.fromarray(np.dstack([255 - PATTERN, np.zeros_like(GREY)]), "CMYK")
    fine: dict[str, Any] = {"quality": 95, "subsampling": 0}
    return [
        ("I11 CMYK.tif", saved(cmyk, "TIFF"), PATTERN, 0),
        ("I11 CMYK.jpg", saved(cmyk, "JPEG", quality=98), PATTERN, 12),
        ("I11 YCbCr.tif", saved(RGB.convert("YCbCr"), "TIFF"), PATTERN, 3),
        ("plain progressive.jpg", saved(RGB, "JPEG", progressive=True, **fine), PATTERN, 8),
        ("plain optimised.jpg", saved(RGB, "JPEG", optimize=True, **fine), PATTERN, 8),
    ]


def profiles() -> list[Case]:
    """I12: Display P3, by its matrix and sRGB's curve, and invalid profiles."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    broken = profile[:40] + b"\0" * 200
    wide = matrix_profile(DISPLAY_P3, srgb_curve())
    in_srgb = srgb_of_p3(PATTERN)
    return [
        Case("profiles/I12 P3.png", put(saved(RGB, "PNG", icc_profile=wide)), pixels=in_srgb, tolerance=1),
        Case("profiles/I12 P3.tif", put(saved(RGB, "TIFF", icc_profile=wide)), pixels=in_srgb, tolerance=1),
        Case(
            "profiles/I12 sRGB.png", put(saved(RGB, "PNG", icc_profile=profile)), pixels=PATTERN, tolerance=1
        ),
        Case("profiles/I12 broken.png", put(saved(RGB, "PNG", icc_profile=broken)), pixels=PATTERN),
        Case("profiles/I12 empty.png", put(saved(RGB, "PNG", icc_profile=b"")), pixels=PATTERN),
        Case(
            "profiles/I12 noise.jpg",
            put(saved(RGB, "JPEG", quality=95, subsampling=0, icc_profile=b"abc")),
            pixels=PATTERN,
            tolerance=8,
        ),
    ]


def animated() -> list[Case]:
    """I13: animations, of which the first frame counts."""
    other = Image.fromarray(255 - PATTERN)
    return [
        Case(
            "animated/I13.webp",
            put(saved(RGB, "WEBP", save_all=True, append_images=[other], lossless=True)),
            pixels=PATTERN,
        ),
        Case(
            "animated/I13.png", put(saved(RGB, "PNG", save_all=True, append_images=[other])), pixels=PATTERN
        ),
        Case(
            "animated/I13.tif", put(saved(RGB, "TIFF", save_all=True, append_images=[other])), pixels=PATTERN
        ),
        Case(
            "animated/I13.gif",
            put(saved(RGB, "GIF", save_all=True, append_images=[other])),
            tolerance=90,
            pixels=PATTERN,
        ),
    ]


def misnamed() -> list[Case]:
    """I03: files with a wrong suffix; their first bytes decide."""
    cases: list[Case] = []
    suffixes = list(FORMATS)
    for kind, wrong in zip(suffixes, suffixes[1:] + suffixes[:1], strict=True):
        data = of_format(kind)
        tolerance = LOSSY.get(kind, 0)
        cases.append(Case(f"misnamed/I03 {kind}.{wrong}", put(data), pixels=PATTERN, tolerance=tolerance))
    return cases


def names() -> list[Case]:
    """I16, I18: unusual file names."""
    unusual = [
        "a b.png",
        "it's.png",
        'say "x".png',
        "tab\tin.png",
        "new\nline.png",
        "percent%20.png",
        "#hash.png",
        "a.b.png",
        "a.c.png",
        "under__score_1024x768.png",
        "\U0001f339 rose.png",
        "\u732b.png",
        "\u00e9.png",
        "-dash.png",
        "~tilde.png",
        "x" * 190 + ".png",
        "$HOME.png",
        "back\\slash.png",
        "*.png",
        "semi;colon.png",
    ]
    return [Case(f"names/I18 {name}", put(of_format("png"))) for name in unusual]
