"""Measures of one picture's quality, from its decoded pixels: detail, exposure, bars and corners.

All measures of an image take about a tenth of the time of its decoding, because they read some of its lines,
or a small copy. `validated_dataset/picture_checks.py` judges the numbers.
"""

from __future__ import annotations

import base64
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from PIL import Image, ImageFilter

Array: TypeAlias = "np.ndarray[Any, Any]"

SAMPLED_EDGE_PX = 512
"""Shorter edge above which only every n-th pixel is sampled for the perceptual hash."""

SMALL_EDGE_PX = 128
"""Shorter edge above which only every n-th pixel is sampled for brightness, bars and corners."""

NUM_LINES, LINES_PER_BLOCK = 12, 4
"""Number of lines in each direction, and of neighbouring lines whose spectra are averaged."""

SEGMENT_PX = 128
"""Length of the segments of a line, or the image's edge."""

MIN_SEGMENT_PX = 32

# Above, only training at more than 2 megapixels would use the detail.
MEASURED_EDGE_PX = 1024
"""Shorter edge above which an image is averaged before its detail is measured."""

_LOW_FREQUENCIES = slice(2, 8)
"""Frequencies of an image's structure, in waves per segment; the window blends lower ones with the mean."""

_CUTOFF = 0.1
"""Level at the cutoff, relative to the highest level of the frequencies below it."""

_MIN_STRUCTURE = 0.1
"""Minimum level of a block's structure, relative to the block with the most; others are background."""

_ROUNDING_VARIANCE = 4 / 12
"""Four times the variance of rounding to 8 bits, in levels."""

FRACTIONS = (0.01, 0.99)
"""Fractions of the pixels below the lowest and the highest level, as in scikit-image's is_low_contrast."""

BLOWN_LEVEL = 250
"""Level from which a pixel counts as white."""

_NEARLY_WHITE_LEVEL = 225

# Measured: the edges of shapes and of photographs cut out on white are at most 9 long, and the edges in
# overexposed photographs at least 11. Cut-outs have at most 0.07 nearly white pixels, a white sky has more.
_MAX_DRAWN_EDGE = 10
"""Maximum length of the edge of a drawn white area, relative to the square root of the smaller side's area; a
square has 4."""

_MAX_DRAWN_NEARLY_WHITE = 0.1
"""Maximum number of nearly white pixels of a drawing, relative to its white ones."""

_BAR_TOLERANCE = 8
"""Maximum difference of a bar's pixels from its level, which a JPEG of quality 75 stays within."""

_BAR_EDGE_CONTRAST = 16
"""Minimum difference from the bar's level behind its edge."""

_BAR_EDGE_FRACTION = 0.75
"""Minimum fraction of the pixels behind the edge with this difference: the edge is straight."""

_BAR_END_FRACTION = 0.3
"""The same for the outer tenth of these pixels on each side."""

CORNER_HW = (16, 24)
"""Height and width of a corner's print, in cells of 1/64 of the picture's shorter edge."""

_CORNERS_EDGE = 64

_NEIGHBOURHOOD_CELLS = 3
"""Number of cells to each side that are a cell's neighbourhood."""

_PRINT_TOLERANCE = 1
"""Difference from the neighbourhood, in levels, up to which a cell counts as flat."""


def sampled(image: Image.Image, edge_px: int = SAMPLED_EDGE_PX) -> Image.Image:
    """Return every n-th pixel; the shorter edge then has fewer than twice `edge_px` pixels."""
    step = min(image.size) // edge_px
    if step <= 1:
        return image
    return image.resize((image.width // step, image.height // step), Image.Resampling.NEAREST)


class Views:
    """An upright RGB image at the sizes that the measures need; each is computed once."""

    def __init__(self, image: Image.Image) -> None:
        """Keep the image."""
        self.image = image

    @cached_property
    def sampled(self) -> Image.Image:
        """The image, or `sampled` of it."""
        return sampled(self.image)

    @cached_property
    def small(self) -> Image.Image:
        """Every n-th pixel; the shorter edge has fewer than twice `SMALL_EDGE_PX` pixels."""
        return sampled(self.sampled, SMALL_EDGE_PX)

    @cached_property
    def grey(self) -> Image.Image:
        """Brightness of every n-th pixel, 8 bits (ITU-R BT.601)."""
        return self.small.convert("L")

    @cached_property
    def percentiles(self) -> Array:
        """1st and 99th percentile (2, 3) of the levels of red, green and blue, 0 to 1."""
        counts = np.array(self.small.histogram()).reshape(3, 256)
        cumulated = counts.cumsum(axis=1) / counts[0].sum()
        ends = [[np.searchsorted(each, fraction) for each in cumulated] for fraction in FRACTIONS]
        return np.array(ends) / 255

    @cached_property
    def contrasts(self) -> Array:
        """Contrast of red, green and blue after Michelson, 0 to 1."""
        low, high = self.percentiles
        return (high - low) / np.maximum(high + low, 1 / 255)

    @cached_property
    def band(self) -> int:
        """Channel that shows the image's structure: green, unless another one has twice its contrast."""
        best = int(self.contrasts.argmax())
        return 1 if 2 * self.contrasts[1] >= self.contrasts[best] else best


def detail_px(views: Views) -> float | None:
    """Return the edge of the smallest square copy with the same detail, in pixels.

    For an image that is sharp to the pixel, or to `MEASURED_EDGE_PX`, it is the square root of its area. Both
    blur and enlarging lower it. None for an image without structure, or smaller than `MIN_SEGMENT_PX`.

    The power spectrum of natural images falls with the square of the frequency (Field, Relations between the
    statistics of natural images and the response properties of cortical cells, 1987). So power times
    frequency squared is level up to the frequency at which detail ends; there it falls to a tenth.

    The sharpest part of the image counts, because a blurred background is not a fault. Of both directions,
    the lower one counts, because of motion blur.
    """
    image = views.image
    shrink = max(1, min(image.size) // MEASURED_EDGE_PX)
    if min(image.size) < MIN_SEGMENT_PX:
        return None
    rows = image.resize((image.width, NUM_LINES), Image.Resampling.NEAREST).getchannel(views.band)
    columns = image.resize((NUM_LINES, image.height), Image.Resampling.NEAREST).getchannel(views.band)
    if shrink > 1:
        rows, columns = rows.reduce((shrink, 1)), columns.reduce((1, shrink))
    cutoffs = [_cutoff(np.asarray(rows)), _cutoff(np.asarray(columns).T)]
    lowest = min((each for each in cutoffs if each is not None), default=None)
    if lowest is None:
        return None
    edge_px = (image.width * image.height) ** 0.5
    return edge_px if lowest == 1 else edge_px / shrink * lowest


def _cutoff(lines: Array) -> float | None:
    """Return the cutoff of the sharpest block, relative to the highest frequency; None without structure."""
    length = min(SEGMENT_PX, lines.shape[1])
    number = lines.shape[1] // length
    segments = lines[:, : number * length].reshape(-1, LINES_PER_BLOCK, number, length).astype(np.float32)
    segments -= segments.mean(axis=3, keepdims=True)
    window = np.hanning(length).astype(np.float32)
    spectrum = np.fft.rfft(segments * window, axis=3)
    power = (spectrum.real**2 + spectrum.imag**2).mean(axis=1).reshape(-1, spectrum.shape[3])

    # A blurred image has nothing but rounding at high frequencies.
    power = np.maximum(power - _ROUNDING_VARIANCE * float((window**2).sum()), 0)
    level = power * np.arange(power.shape[1], dtype=np.float32) ** 2
    # Three neighbours are averaged, because one frequency may be missing in a regular pattern.
    level[:, 1:-1] = (level[:, :-2] + level[:, 1:-1] + level[:, 2:]) / 3
    structure = level[:, _LOW_FREQUENCIES].max(axis=1)
    if not structure.any():
        return None

    level = level[structure >= _MIN_STRUCTURE * structure.max(), _LOW_FREQUENCIES.start :]
    is_below = level < _CUTOFF * np.maximum.accumulate(level, axis=1)
    if not is_below.any(axis=1).all():
        return 1.0
    return (int(is_below.argmax(axis=1).max()) + _LOW_FREQUENCIES.start) / (power.shape[1] - 1)


def brightest(views: Views) -> float:
    """Return the level that one pixel in a hundred exceeds, of the brightest channel, 0 to 1."""
    return float(views.percentiles[1].max())


def contrast(views: Views) -> float:
    """Return the contrast of the channel with the most contrast, 0 to 1."""
    return float(views.contrasts.max())


def white(views: Views) -> float:
    """Return the fraction of the pixels that are white, or 0 if the white area is drawn.

    Light that is lost to an exposure leaves a ragged area with nearly white tones around it. A shape that is
    drawn or cut out on white has a short and sharp edge.
    """
    levels = np.asarray(views.grey)
    is_white = levels >= BLOWN_LEVEL
    num_white = int(is_white.sum())
    smaller_area = min(num_white, levels.size - num_white)
    edge_px = sum(int((each[1:] != each[:-1]).sum()) for each in (is_white, is_white.T))
    nearly_white = int((levels >= _NEARLY_WHITE_LEVEL).sum()) - num_white
    is_short = edge_px < _MAX_DRAWN_EDGE * smaller_area**0.5
    is_drawn = is_short and nearly_white < _MAX_DRAWN_NEARLY_WHITE * num_white
    return 0.0 if is_drawn else num_white / levels.size


def colours(views: Views) -> str:
    """Return the mean colours of 4x4 parts in the order of reading, each as six hexadecimal digits."""
    return views.small.resize((4, 4), Image.Resampling.BOX, reducing_gap=1.0).tobytes().hex()


def bars(views: Views) -> float:
    """Return the fraction of the area that uniform bars along the edges cover.

    A bar has one level and a straight inner edge. A plain background behind a subject has no such edge.
    """
    pixels = np.asarray(views.grey).astype(np.int16)
    top, bottom = _bar(pixels), _bar(pixels[::-1])
    inner = pixels[top : len(pixels) - bottom].T
    if not len(inner) or not inner.shape[1]:
        return 0.0
    left, right = _bar(inner), _bar(inner[::-1])
    return 1.0 - inner[left : len(inner) - right].size / pixels.size


def _bar(lines: Array) -> int:
    """Return the number of lines of a bar at the start of an image (lines, pixels)."""
    level = int(lines[0, 0])
    if np.abs(lines[0] - level).max() > 2 * _BAR_TOLERANCE:
        return 0  # nearly all images end here
    # An edge in the outer half of the image: a bar never covers more.
    is_uniform = (np.abs(lines[: len(lines) // 2] - level) <= _BAR_TOLERANCE).mean(axis=1) > 0.99
    number = int(np.argmin(is_uniform)) if not is_uniform.all() else 0
    if not number:
        return 0
    # The line at the edge is a mixture of both sides where the image was scaled.
    behind = np.abs(lines[number + 1] - level) > _BAR_EDGE_CONTRAST
    # The flat side of a subject, such as a house, does not reach both sides of the image.
    end = -(-len(behind) // 10)
    reaches_sides = behind[:end].mean() >= _BAR_END_FRACTION and behind[-end:].mean() >= _BAR_END_FRACTION
    return number if reaches_sides and behind.mean() >= _BAR_EDGE_FRACTION else 0


def corners(views: Views) -> str | None:
    """Return which cells of the corners are lighter or darker than their neighbourhood, as Base64.

    Corners are in the order of reading, and have `CORNER_HW` cells. A bit per cell states that it is lighter;
    the same number of bits follows for darker ones. None for an image that is too small.
    """
    grey, (height, width) = views.grey, CORNER_HW
    shrink = min(grey.size) / _CORNERS_EDGE
    if shrink < 1:
        return None
    size_wh = (round(grey.width / shrink), round(grey.height / shrink))
    cells = grey.resize(size_wh, Image.Resampling.BOX)
    neighbourhood = cells.filter(ImageFilter.BoxBlur(_NEIGHBOURHOOD_CELLS))
    difference = np.asarray(cells).astype(np.int16) - np.asarray(neighbourhood)
    parts = [difference[rows, columns] for rows, columns in product(_ends(height), _ends(width))]
    bits = np.stack([np.stack(parts) > _PRINT_TOLERANCE, np.stack(parts) < -_PRINT_TOLERANCE])
    return base64.b64encode(np.packbits(bits).tobytes()).decode()


def _ends(length: int) -> tuple[slice, slice]:
    return slice(None, length), slice(-length, None)


def signs_of_corners(text: str) -> Array:
    """Return int8 signs (4, height, width) of `corners`: 1 is lighter than its neighbourhood, -1 darker."""
    height, width = CORNER_HW
    bits = np.unpackbits(np.frombuffer(base64.b64decode(text), dtype=np.uint8))
    lighter, darker = bits[: 8 * height * width].reshape(2, 4, height, width).astype(np.int8)
    return lighter - darker


# Luminance table of ITU-T T.81, annex K. libjpeg scales it for each quality.
_STANDARD_TABLE = np.array(
    [
        *(16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55),
        *(14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51, 87, 80, 62),
        *(18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92),
        *(49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99),
    ]
)
_QUALITIES = np.arange(1, 101)
_SCALES = np.where(_QUALITIES < 50, 5000 // _QUALITIES, 200 - 2 * _QUALITIES)
_SUMS = np.clip((_STANDARD_TABLE * _SCALES[:, None] + 50) // 100, 1, 255).sum(axis=1)
"""Sum of libjpeg's table at each quality from 1 to 100; it falls."""


def jpeg_quality(views: Views) -> int | None:
    """Return the quality, 1 to 100, at which libjpeg quantizes as much as this JPEG; None for other formats.

    Programs with tables of their own get the quality of the standard table with the nearest sum.
    """
    tables = views.image.info.get("quantization")
    if not tables:
        return None
    return int(_QUALITIES[np.abs(_SUMS - sum(tables[min(tables)])).argmin()])
