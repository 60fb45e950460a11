"""Convert an image of any Pillow mode to 8-bit sRGB.

The steps, in order: split off transparency and apply the palette; scale I, F and I;16 to 8 bits; convert the
embedded profile to sRGB; composite over a background.
"""

from __future__ import annotations

import io
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from PIL import Image, ImageCms

Background = tuple[int, int, int]
"""Red, green and blue, 0 to 255, of the colour that shows through transparent pixels."""

# Pillow's mode by the colour space of a profile.
_PROFILE_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}

_BITS_PER_SAMPLE_TAG = 258

STRIP_PX = 1_000_000
"""Number of pixels converted at a time. A strip's intermediate results take up to 30 bytes per pixel."""

_Levels = tuple[float, float]
"""Black and white level of an image with more than 8 bits."""


def to_srgb(image: Image.Image, background: Background) -> Image.Image:
    """Return the image in mode RGB: 8-bit sRGB without transparency; the same object if nothing changes.

    Grey levels of more than 8 bits are scaled, not clipped. An embedded profile is converted with relative
    colorimetric intent and black point compensation; a profile that does not fit the image's mode is ignored,
    as viewers do. Transparent pixels are composited over `background`, an sRGB colour.
    """
    if is_srgb(image):
        return image

    # The levels of the complete image, so that all strips are scaled by the same factor.
    levels = _levels(image)
    if image.width * image.height <= STRIP_PX:
        return _strip_to_srgb(image, background, levels)

    # Strips, so that no intermediate result is as large as the image.
    rgb = Image.new("RGB", image.size)
    strip_height = max(1, STRIP_PX // image.width)
    for top in range(0, image.height, strip_height):
        strip = image.crop((0, top, image.width, min(top + strip_height, image.height)))
        rgb.paste(_strip_to_srgb(strip, background, levels), (0, top))
    return rgb


def is_srgb(image: Image.Image) -> bool:
    """Return True if the image already is opaque 8-bit sRGB, so that `to_srgb` changes nothing."""
    return image.mode == "RGB" and "transparency" not in image.info and not changes_colours(image)


def opacity(image: Image.Image) -> Image.Image | None:
    """Return the image's opacity in mode L, 255 for opaque; None if it stores none, as a JPEG."""
    if not image.has_transparency_data and image.mode not in {"RGBa", "La"}:
        return None
    _, alpha = _split_alpha(image)
    return Image.new("L", image.size, 255) if alpha is None else alpha


def _strip_to_srgb(image: Image.Image, background: Background, levels: _Levels) -> Image.Image:
    profile = image.info.get("icc_profile")
    colours, alpha = _split_alpha(image)
    rgb = _convert_profile(_eight_bits(colours, levels), profile)
    if alpha is None:
        return rgb
    return Image.composite(rgb, Image.new("RGB", rgb.size, background), alpha)


def changes_colours(image: Image.Image) -> bool:
    """Return True if the image has a profile other than sRGB that `to_srgb` converts."""
    profile = image.info.get("icc_profile")
    if not profile:
        return False
    mode = {"P": "RGB", "PA": "RGB"}.get(image.mode, image.mode.rstrip("Aa") or image.mode)
    return _transform(profile, _profile_mode(mode, profile)) is not None


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    if image.mode == "P":
        image = image.convert("RGBA" if image.has_transparency_data else "RGB")
    elif image.mode.startswith("I;16") and "transparency" in image.info:
        # Pillow has no mode with 16 bits and alpha, so the transparent level becomes a mask here.
        opaque = np.asarray(image) != image.info["transparency"]
        return image, Image.fromarray(opaque.astype(np.uint8) * 255)
    elif image.mode in {"1", "L", "RGB"} and "transparency" in image.info:
        image = image.convert("RGBA" if image.mode == "RGB" else "LA")
    elif image.mode in {"PA", "RGBa", "La"}:
        image = image.convert("LA" if image.mode == "La" else "RGBA")
    if image.mode not in {"RGBA", "LA"}:
        return image, None

    alpha = image.getchannel("A")
    colours = image.convert("RGB") if image.mode == "RGBA" else image.getchannel("L")
    colours.info = image.info  # keeps the profile
    return colours, None if alpha.getextrema() == (255, 255) else alpha


def _eight_bits(image: Image.Image, levels: _Levels) -> Image.Image:
    if image.mode == "1":
        return image.convert("L")
    if not (image.mode.startswith("I") or image.mode == "F"):
        return image

    low, high = levels
    values = np.asarray(image).astype(np.float64)
    scaled = np.clip((values - low) * (255.0 / (high - low)), 0.0, 255.0)
    return Image.fromarray(np.floor(scaled + 0.5).astype(np.uint8))


def _levels(image: Image.Image) -> _Levels:
    """Return the black and white level of a deep grey image; (0, 255) for all others."""
    if image.mode.startswith("I;16"):
        return 0.0, float((1 << _bits(image)) - 1)
    return _range(image) if image.mode in {"I", "F"} else (0.0, 255.0)


def _bits(image: Image.Image) -> int:
    # Pillow opens a TIFF of 12 bits as I;16, with its values as they are.
    tags: Any = getattr(image, "tag_v2", {})
    return 12 if tags.get(_BITS_PER_SAMPLE_TAG, (16,))[0] == 12 else 16


def _range(image: Image.Image) -> _Levels:
    """Return black and white level of an image in mode I or F; raises ValueError for NaN and infinity."""
    lowest, highest = np.inf, -np.inf
    strip_height = max(1, STRIP_PX // image.width)
    for top in range(0, image.height, strip_height):
        box = (0, top, image.width, min(top + strip_height, image.height))
        levels = np.asarray(image.crop(box)).astype(np.float64)
        if not np.isfinite(levels).all():
            raise ValueError("all levels must be finite numbers")
        lowest, highest = min(lowest, float(levels.min())), max(highest, float(levels.max()))

    # These modes do not record their white. A negative level shows that values are not intensities from 0, so
    # the range is stretched; otherwise white is the smallest usual maximum that no level exceeds.
    if lowest < 0:
        return lowest, max(highest, lowest + 1.0)
    whites = (1.0, 255.0, 65_535.0, float(2**31 - 1))
    return 0.0, next((white for white in whites if highest <= white), highest)


def _convert_profile(image: Image.Image, profile: bytes | None) -> Image.Image:
    if image.mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        return _applied(ImageCms.buildTransform(lab, srgb, "LAB", "RGB"), image)
    if not profile:
        # Copying a photograph takes half as long as decoding it.
        return image if image.mode == "RGB" else image.convert("RGB")
    mode = _profile_mode(image.mode, profile)
    transform = _transform(profile, mode)
    if transform is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    return _applied(transform, image if image.mode == mode else image.convert(mode))


def _applied(transform: ImageCms.ImageCmsTransform, image: Image.Image) -> Image.Image:
    converted = ImageCms.applyTransform(image, transform)
    assert converted is not None  # None only if the image is converted in place
    return converted


@lru_cache(maxsize=256)
def _profile_mode(mode: str, profile: bytes) -> str:
    """Return the mode that the profile applies to; "" if it does not fit an image of `mode`."""
    try:
        opened: Any = ImageCms.getOpenProfile(io.BytesIO(profile))
    except (OSError, ImageCms.PyCMSError):
        return ""
    profile_mode = _PROFILE_MODES.get(opened.profile.xcolor_space.strip(), "")

    # An RGB profile also fits grey images, because cameras write it.
    fitting = {"L": ("L", "RGB"), "1": ("L", "RGB"), "CMYK": ("CMYK",)}.get(mode, ("RGB",))
    return profile_mode if profile_mode in fitting else ""


@lru_cache(maxsize=64)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the conversion to sRGB; None if the profile is unusable or describes sRGB."""
    if not mode:
        return None
    try:
        transform = ImageCms.buildTransform(
            ImageCms.getOpenProfile(io.BytesIO(profile)),
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (OSError, ImageCms.PyCMSError):
        return None
    if mode == "CMYK":
        return transform

    # Rounding changes levels by one. A profile that changes none by more is sRGB, and the image can be used
    # as it is.
    probe = _probe(mode)
    change = np.asarray(_applied(transform, probe)).astype(int) - np.asarray(probe.convert("RGB"))
    return transform if np.abs(change).max() > 1 else None


def _probe(mode: str) -> Image.Image:
    if mode == "L":
        return Image.fromarray(np.arange(256, dtype=np.uint8).reshape(1, 256))
    levels = np.linspace(0, 255, 17).round().astype(np.uint8)
    return Image.fromarray(np.array([*product(levels, repeat=3)]).reshape(17, 289, 3))
