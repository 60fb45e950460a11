"""The values that are measured on the pixels of every image when it is decoded for validation.

Another value needs a function in `pixel_measures.py` and an entry in `PIXEL_VALUES` here, a column of
validated_dataset with the same name in `PICTURE_COLUMNS` (`storage/table_columns.py`) unless only the stage
uses it, and a new `LOOK_VERSION`, so that every image is decoded again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from PIL import Image

from pipeline.images import pixel_measures as measures
from pipeline.images.pixel_measures import Views, sampled

# Averaging first takes a tenth of the time of converting the full image.
_SMALL_EDGE_PX = 64
"""Shorter edge to which an image is averaged at least."""

_EDGE = 8
"""Number of the lowest frequencies per axis."""

_GREY_EDGE_PX = 4 * _EDGE

_COSINES = 2 * np.cos(
    np.pi / (2 * _GREY_EDGE_PX) * np.outer(np.arange(_EDGE), 2 * np.arange(_GREY_EDGE_PX) + 1)
)
"""First rows of the discrete cosine transform of type II, y[k] = 2 sum over n of x[n] cos(pi k (2n + 1) /
2N), as defined in the SciPy reference of `scipy.fft.dct`."""

# In drawings, many frequencies are equal in exact arithmetic. Without a tolerance, as in ImageHash, rounding
# decides their bits. Frequencies are sums of 1,024 levels, at most 10^6, with rounding errors below 10^-8.
_TOLERANCE = 1e-6
"""Difference up to which two frequencies are equal."""


def perceptual_hash(image: Image.Image) -> int | None:
    """Return the 64 bits of an RGB image's pHash; None for a single-colour image, which has no features.

    pHash as the package ImageHash defines it: the signs of the 8x8 lowest frequencies relative to their
    median, which change little under scaling, recompression or a change of brightness. Bits are equal to
    those of ImageHash for photographs, but not for all drawings.
    """
    # ImageHash is the reference in the tests. It is not called, because its dependency SciPy adds 0.3 s to
    # the first hash and 120 MB to the installation.
    # Averaging all of 8 megapixels would take a seventh of their decoding time. On 40 photographs and their
    # copies at two thirds of the size, both hashes differ by at most 4 bits.
    image = sampled(image)
    shrink = min(image.size) // _SMALL_EDGE_PX
    small = image.reduce(shrink) if shrink > 1 else image
    extrema: Any = small.getextrema()

    # All frequencies of one colour are zero, so that all such images would be similar to each other.
    if all(low == high for low, high in extrema):
        return None

    grey = small.convert("L").resize((_GREY_EDGE_PX, _GREY_EDGE_PX), Image.Resampling.LANCZOS)
    levels = np.frombuffer(grey.tobytes(), dtype=np.uint8).reshape(_GREY_EDGE_PX, _GREY_EDGE_PX)
    frequencies = (_COSINES @ levels @ _COSINES.T).ravel()
    is_high = frequencies > np.median(frequencies) + _TOLERANCE
    return int.from_bytes(np.packbits(is_high).tobytes(), "big")


class PixelValue(NamedTuple):
    """A value of an image.

    Attributes:
        dtype: Type of its column.
        measure: Returns the value from views of an upright RGB image, or None. JSON must be able to
            represent it.
    """

    dtype: type[pl.DataType]
    measure: Callable[[Views], Any]


PIXEL_VALUES: dict[str, PixelValue] = {
    "perceptual_hash": PixelValue(pl.UInt64, lambda views: perceptual_hash(views.sampled)),
    "detail_px": PixelValue(pl.Float64, measures.detail_px),
    "brightest": PixelValue(pl.Float64, measures.brightest),
    "contrast": PixelValue(pl.Float64, measures.contrast),
    "white": PixelValue(pl.Float64, measures.white),
    "bars": PixelValue(pl.Float64, measures.bars),
    "colours": PixelValue(pl.String, measures.colours),
    "corners": PixelValue(pl.String, measures.corners),
    "jpeg_quality": PixelValue(pl.Int32, measures.jpeg_quality),
}
"""The values by name. Those that are columns of validated_dataset are copied into its table."""


def pixel_values(image: Image.Image) -> dict[str, Any]:
    """Return every value of `PIXEL_VALUES` for an upright RGB image."""
    views = Views(image)
    return {name: value.measure(views) for name, value in PIXEL_VALUES.items()}
