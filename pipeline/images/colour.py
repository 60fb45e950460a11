"""Convert an image of any Pillow mode to 8-bit sRGB.

The steps, in order: split off transparency and apply the palette; scale I, F and I;16 to 8 bits; convert the
embedded profile to sRGB; composite over a background.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms

from pipeline.images.formats import ImageError

Background = tuple[int, int, int]
"""Red, green and blue, 0 to 255, of the colour that shows through transparent pixels."""

# Pillow's mode by the colour space of a profile.
_PROFILE_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}

# Tags of TIFF.
_BITS_PER_SAMPLE = 258
_PHOTOMETRIC_INTERPRETATION = 262
_SAMPLE_FORMAT = 339
_SMALLEST_LEVEL, _LARGEST_LEVEL = 340, 341

_WHITE_IS_ZERO = 0
"""Value of the photometric interpretation for grey images whose largest level is black."""

_UNSIGNED = 1
"""Value of the sample format, and its default."""

_USUAL_WHITES = (1.0, 255.0, 65_535.0)
"""Usual white levels of images that do not state theirs; the largest integer of their type follows."""

MAX_OVERSHOOT = 0.25
"""Share of white by which sharpening and scaling may leave levels above white, or below black."""

MIN_BRIGHTEST = 1 / 4
"""Share of white that the brightest hundredth of an image reaches. Below it, either nearly all of the image
is black, or another level is white."""

STRIP_PX = 1_000_000
"""Number of pixels converted at a time. A strip's intermediate results take up to 30 bytes per pixel."""


class _Levels(NamedTuple):
    """The levels of an image with more than 8 bits.

    Attributes:
        black: Level that becomes 0. It is above `white` if the image stores white as zero.
        white: Level that becomes 255.
        is_unsigned: Whether mode I holds unsigned integers, which Pillow reads as signed ones.
    """

    black: float
    white: float
    is_unsigned: bool = False


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
    for box in _strips(image):
        rgb.paste(_strip_to_srgb(image.crop(box), background, levels), box)
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


def decoding_rules(image: Image.Image) -> list[str]:
    """Return the names of the rules by which a loaded image is decoded in another way than by 0.3.0.

    See `decode.decoded`.

    Raises:
        ValueError: A level is not finite.
        ImageError: The white level is unknown (`range_unknown`).
    """
    is_rescaled = image.mode in {"I", "F"} and not _deep_levels(image)[1]
    rules = {"levels": is_rescaled, "white_is_zero": _is_white_zero(image)}
    return [name for name, applies in rules.items() if applies]


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
    # `to_srgb` scales deep levels to 8 bits before it converts the profile.
    mode = "L" if mode == "F" or mode.startswith("I") else mode
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

    values = _stored(image, levels.is_unsigned)
    scaled = np.clip((values - levels.black) * (255.0 / (levels.white - levels.black)), 0.0, 255.0)
    return Image.fromarray(np.floor(scaled + 0.5).astype(np.uint8))


def _stored(image: Image.Image, is_unsigned: bool) -> npt.NDArray[np.float64]:
    values = np.asarray(image)
    return (values.view(np.uint32) if is_unsigned else values).astype(np.float64)


def _levels(image: Image.Image) -> _Levels:
    """Return the levels of a deep grey image; (0, 255) for all others. Raises as `_deep_levels`."""
    if image.mode.startswith("I;16"):
        levels = _Levels(0.0, float((1 << _bits(image)) - 1))
    elif image.mode in {"I", "F"}:
        levels, _ = _deep_levels(image)
    else:
        return _Levels(0.0, 255.0)
    is_inverted = _is_white_zero(image)
    return levels._replace(black=levels.white, white=levels.black) if is_inverted else levels


def _is_white_zero(image: Image.Image) -> bool:
    """Return True if the levels of a deep grey image must be inverted."""
    # Pillow inverts TIFFs of up to 8 bits while it decodes them.
    is_deep = image.mode.startswith("I") or image.mode == "F"
    return is_deep and _tags(image).get(_PHOTOMETRIC_INTERPRETATION) == _WHITE_IS_ZERO


def _tags(image: Image.Image) -> Mapping[int, Any]:
    return getattr(image, "tag_v2", {})


def _first(tags: Mapping[int, Any], tag: int, default: float) -> float:
    """Return the first value of a TIFF's tag."""
    value = tags.get(tag, default)
    return float(value[0] if isinstance(value, tuple) else value)


def _bits(image: Image.Image) -> int:
    # Pillow opens a TIFF of 12 bits as I;16, with its values as they are.
    return 12 if _first(_tags(image), _BITS_PER_SAMPLE, 16) == 12 else 16


def _deep_levels(image: Image.Image) -> tuple[_Levels, bool]:
    """Return the levels of an image in mode I or F, and whether 0.3.0 used the same.

    These modes do not record their white. A TIFF may state it. Otherwise it is the smallest usual white that
    the image hardly exceeds: a few single levels, such as hot pixels, may be arbitrarily high, and all others
    up to `MAX_OVERSHOOT` above white, or below black. Levels that are further below black are not intensities
    from 0, so that the range is stretched.

    Raises:
        ValueError: A level is not finite.
        ImageError: No usual white suits the levels (`range_unknown`).
    """
    tags = _tags(image)
    bits = _first(tags, _BITS_PER_SAMPLE, 32)
    is_unsigned = image.mode == "I" and bits == 32 and bool(tags)
    is_unsigned = is_unsigned and _first(tags, _SAMPLE_FORMAT, _UNSIGNED) == _UNSIGNED
    lowest, highest, sample = _extremes(image, is_unsigned)
    before = _levels_before(lowest, highest)
    largest = 2**32 - 1 if is_unsigned else 2**15 - 1 if image.mode == "I" and bits == 16 else 2**31 - 1

    black, white = _stated_levels(tags, highest) or _usual_levels(lowest, highest, sample, float(largest))
    levels = _Levels(black, white, is_unsigned)
    # 0.3.0 read unsigned levels as signed ones.
    return levels, (black, white) == before and highest < 2**31


def _extremes(image: Image.Image, is_unsigned: bool) -> tuple[float, float, npt.NDArray[np.float64]]:
    """Return the lowest and the highest level, and about `STRIP_PX` levels from all over the image."""
    lowest, highest = np.inf, -np.inf
    step = ceil(image.width * image.height / STRIP_PX)
    sample: list[npt.NDArray[np.float64]] = []
    for box in _strips(image):
        levels = _stored(image.crop(box), is_unsigned)
        if not np.isfinite(levels).all():
            raise ValueError("all levels must be finite numbers")
        lowest, highest = min(lowest, float(levels.min())), max(highest, float(levels.max()))
        sample.append(levels.ravel()[::step].copy())
    return lowest, highest, np.concatenate(sample)


def _levels_before(lowest: float, highest: float) -> tuple[float, float]:
    """Return the black and white level that 0.3.0 used, which knew nothing but the extreme levels."""
    if lowest < 0:
        return lowest, max(highest, lowest + 1.0)
    whites = (*_USUAL_WHITES, float(2**31 - 1))
    return 0.0, next((white for white in whites if highest <= white), highest)


def _stated_levels(tags: Mapping[int, Any], highest: float) -> tuple[float, float] | None:
    """Return the black and white level that a TIFF states; None if it states none that suits its levels."""
    if _LARGEST_LEVEL not in tags:
        return None
    black, white = _first(tags, _SMALLEST_LEVEL, 0.0), _first(tags, _LARGEST_LEVEL, 0.0)
    # Some programs write the largest number of the data type.
    is_suitable = np.isfinite(white - black) and highest - black > MIN_BRIGHTEST * (white - black) > 0
    return (black, white) if is_suitable else None


def _usual_levels(
    lowest: float, highest: float, sample: npt.NDArray[np.float64], largest: float
) -> tuple[float, float]:
    """Return the black and white level that the distribution of the levels suggests."""
    # Black is not counted, so that a small bright object on black decides like a bright image.
    bright = sample[sample > 0]
    top = _quantile(bright, 0.99) if bright.size else highest
    bottom = _quantile(sample, 0.01)
    whites = (*(white for white in _USUAL_WHITES if white < largest), largest)
    white = next((white for white in whites if top <= white * (1 + MAX_OVERSHOOT)), None)
    is_usual = white is not None and (white == whites[0] or top > white * MIN_BRIGHTEST)
    if white is not None and is_usual and bottom >= -MAX_OVERSHOOT * white:
        return 0.0, white
    if bottom >= 0:
        usual = ", ".join(f"{white:,.0f}" for white in whites)
        detail = f"its brightest levels are about {top:.6g}, which suits no usual white level ({usual})"
        fix = "save it as 8-bit or 16-bit grey, or as floating-point numbers from 0 (black) to 1 (white)"
        raise ImageError("range_unknown", detail, fix=fix)

    # Negative levels are no intensities, so the range is stretched. Only extremes far from all other levels
    # are clipped.
    top = _quantile(sample, 0.99)
    tolerance = MAX_OVERSHOOT * (top - bottom)
    black = lowest if lowest >= bottom - tolerance else bottom
    white = highest if highest <= top + tolerance else top
    return black, max(white, black + 1.0)


def _quantile(levels: npt.NDArray[np.float64], share: float) -> float:
    return float(np.quantile(levels, share, method="nearest"))


def _strips(image: Image.Image) -> Iterator[tuple[int, int, int, int]]:
    """Yield boxes of about `STRIP_PX` pixels, from top to bottom."""
    strip_height = max(1, STRIP_PX // image.width)
    for top in range(0, image.height, strip_height):
        yield 0, top, image.width, min(top + strip_height, image.height)


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
