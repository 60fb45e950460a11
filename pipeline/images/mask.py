"""Masks: grey images, or the opacity of an image. Their values weight the loss by place.

A mask is resized, cropped and mirrored by the same filter and numbers as its image. Its values are then
averaged over the pixels of each latent value.
"""

from __future__ import annotations

import io
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageChops

from pipeline.images import colour
from pipeline.images.colour import Background
from pipeline.images.decode import (
    Convert,
    DecodeLimits,
    File,
    decoded,
    decoding_of,
    limits_of_accepted,
    open_content,
    read_bytes,
)
from pipeline.images.failures import image_errors
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Geometry, Size

MaskSource = Literal["file", "alpha"]
"""Origin of a mask: the grey values of a file, or the opacity of the image."""

MAX_COLOUR = 32
"""Largest difference of two channels of a pixel that counts as grey. A grey JPEG has a few levels."""

MIN_WHITE = 8
"""Level that the brightest pixel of a mask must exceed. Masks of 0 and 1 are a frequent mistake."""

_BLACK: Background = (0, 0, 0)
_DARK_RED = (160, 48, 48)
_WHITE = 255


class MaskContent(NamedTuple):
    """Facts of a mask file.

    Attributes:
        size: Size after EXIF orientation.
        mean: Mean weight, from 0 to 1.
        decoding: Names of its decoding rules (`decode.decoded`); None if it has none.
    """

    size: Size
    mean: float
    decoding: str | None


def read_mask(content: BinaryIO, source: MaskSource, *, limits: DecodeLimits) -> MaskContent:
    """Decode an open mask completely.

    Raises:
        ImageError: The mask cannot be decoded, or it is not usable: `mask_alpha_missing`,
            `mask_transparent`, `mask_not_grey` or `mask_black`.
    """
    rules: list[str] = []

    def convert(image: Image.Image, background: Background) -> Image.Image:
        if source == "alpha" or not colour.changes_colours(image):
            return _CONVERT[source](image, background)
        converted = colour.to_srgb(image, background).getchannel("G")  # as 0.3.0 read masks
        grey = _grey(image, background)
        if ImageChops.difference(converted, grey).getbbox() is not None:
            rules.append("stored_numbers")
        return grey

    with decoded(content, _BLACK, limits=limits, convert=convert, rules=rules) as mask:
        values = np.asarray(mask)
        size = Size(mask.height, mask.width)

    # A mask of 0 and 1 is the usual mistake: it looks black, and would switch the sample off.
    brightest = int(values.max())
    if brightest <= MIN_WHITE:
        detail = f"its brightest value is {brightest} of {_WHITE}, so nothing of the image would be trained"
        fix = "draw the mask again; a mask of 0 and 1 must be stored as 0 and 255"
        raise ImageError("mask_black", detail, fix=fix)
    decoding = decoding_of(name for name in rules if name in _RULES[source])
    return MaskContent(size, float(values.mean(dtype=np.float64)) / _WHITE, decoding)


def load_mask(
    file: File, geometry: Geometry, source: MaskSource, *, flipped: bool, content_hash: str
) -> npt.NDArray[np.uint8]:
    """Return the mask of the pixels that `load_pixels` returns: a uint8 array (H, W) of the target size.

    `file` is the mask file, or the image file for its opacity, and `content_hash` its `hash_bytes`.

    Raises:
        ImageError: The file is missing (`vanished`), has other content (`changed`), or is not usable.
    """
    limits = limits_of_accepted(geometry.original_size)
    with (
        image_errors(str(file)),
        open_content(file, content_hash) as content,
        decoded(content, _BLACK, limits=limits, convert=_CONVERT[source]) as mask,
    ):
        return fit_mask(mask, geometry, flipped=flipped)


def fit_mask(mask: Image.Image, geometry: Geometry, *, flipped: bool) -> npt.NDArray[np.uint8]:
    """Return a mask of the original size (mode L) as uint8 (H, W) of the target size."""
    target = geometry.target_size
    size_wh = (target.width, target.height)

    # The filter of `load_pixels`, so that a grey image and an equal mask stay equal.
    resized = np.array(mask.resize(size_wh, Image.Resampling.BICUBIC, box=geometry.source_box))
    return np.ascontiguousarray(resized[:, ::-1]) if flipped else resized


def mask_weights(values: npt.NDArray[np.uint8], size: Size) -> npt.NDArray[np.float16]:
    """Return the mean weight in the area of each latent value, float16 (1, h, w) from 0 to 1.

    The edges of the mask (H, W) are multiples of the edges of the latent's `size` (h, w).
    """
    height, width = values.shape
    rows, columns = height // size.height, width // size.width

    # Averaged like the VAE reduces the image; a resize filter would look beyond the area of a value.
    areas = values.reshape(size.height, rows, size.width, columns)
    # Sums of integers, so that mirroring before and after gives the same bytes.
    sums = areas.sum(axis=(1, 3), dtype=np.int64)
    return (sums / (rows * columns * _WHITE)).astype(np.float16)[None]


def show_mask(image: Image.Image, *, mask: File, source: MaskSource) -> Image.Image:
    """Return the image (mode RGB), dark red where its mask is black; it may be smaller than the mask.

    Raises:
        ImageError: The mask cannot be read.
    """
    with image_errors(str(mask)):
        data = io.BytesIO(read_bytes(mask))
        with decoded(data, _BLACK, limits=DecodeLimits(), convert=_CONVERT[source]) as weights:
            fitted = weights.resize(image.size)
    return Image.composite(image, ImageChops.multiply(image, Image.new("RGB", image.size, _DARK_RED)), fitted)


def _opacity(image: Image.Image, _: Background) -> Image.Image:
    alpha = colour.opacity(image)
    if alpha is None:
        detail = f"the image stores no transparency ({image.format}, {image.mode})"
        fix = "save it with transparency, such as PNG or WebP, or use mask: {path: ...} for separate masks"
        raise ImageError("mask_alpha_missing", detail, fix=fix)
    return alpha


def _grey(image: Image.Image, background: Background) -> Image.Image:
    alpha = colour.opacity(image)
    if alpha is not None and alpha.getextrema() != (_WHITE, _WHITE):
        detail = "the mask has transparent pixels, so its weights are either its grey values or its opacity"
        fix = "save it without transparency, as black, grey and white"
        raise ImageError("mask_transparent", detail, fix=fix)

    # The numbers of a mask are weights and not colours, so a profile must not change them.
    image.info.pop("icc_profile", None)
    bands = colour.to_srgb(image, background).split()
    pairs = ((0, 1), (1, 2), (0, 2))
    differences = (ImageChops.difference(bands[first], bands[second]) for first, second in pairs)
    difference = max(int(np.asarray(each).max()) for each in differences)
    if difference > MAX_COLOUR:
        detail = f"its colours are not grey: channels of a pixel differ by {difference} levels"
        fix = "save it as black, grey and white; a palette of classes is not a mask"
        raise ImageError("mask_not_grey", detail, fix=fix)
    return bands[1]


_RULES: dict[MaskSource, tuple[str, ...]] = {
    "file": ("levels", "stored_numbers", "white_is_zero"),
    "alpha": ("colour_key",),
}
"""Decoding rules of an image that change a mask."""

_CONVERT: dict[MaskSource, Convert] = {"file": _grey, "alpha": _opacity}
