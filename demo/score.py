"""The demo's score: which shape, colour and background a picture shows, measured on its pixels.

`WorldScorer` is the same measure as a scorer of `evaluation.scorers`, in the recipe `demo.score:WorldScorer`.

1. The background's colour is the median of the picture's border.
2. Each pixel's place between the colours of background and shape is a mask, from 0 to 1.
3. The mask is scaled to its bounding box and compared with each shape's by intersection over union. A shape
   is recognised if the best match is at least `MIN_OVERLAP`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from scipy import ndimage

import demo.world
from demo.world import BACKGROUNDS, COLOURS, CONCEPT, SHAPES, Array, Scene, scene_of, shape_mask

MIN_OVERLAP = 0.8
"""Minimum overlap with the mask of a recognised shape, from 0 to 1."""

_BORDER_PX = 3

_BOX_PX = 32
"""Edge of the box in which masks are compared."""

_BOX_MARGIN_PX = 1
"""Margin around the mask in that box, in the picture's pixels."""

_MIN_CONTRAST = 40.0
"""Minimum distance in RGB between a shape and its background."""

_EDGE = 0.5
"""Value of a mask at the shape's edge."""

_MIN_PART = 0.05
"""Smaller parts of a mask, relative to the largest, are ignored."""


@dataclass(frozen=True)
class Reading:
    """Content of a picture.

    Attributes:
        shape: Recognised shape, or None.
        colour: Name of the closest colour of `COLOURS`, or None if the picture is plain.
        background: Name of the closest colour of `BACKGROUNDS`.
    """

    shape: str | None
    colour: str | None
    background: str


@dataclass(frozen=True)
class Score:
    """Fractions of pictures that show what their prompt describes.

    Attributes:
        all_three: Fraction with the right shape, colour and background.
    """

    shape: float
    colour: float
    background: float
    all_three: float


def read_picture(picture: Array) -> Reading:
    """Return what a picture shows.

    Args:
        picture: uint8 array (H, W, 3).
    """
    pixels = picture.astype(np.float32)
    border = np.ones(pixels.shape[:2], dtype=bool)
    border[_BORDER_PX:-_BORDER_PX, _BORDER_PX:-_BORDER_PX] = False
    background = np.median(pixels[border], axis=0)
    background_name = _closest(background, BACKGROUNDS)

    distance = np.linalg.norm(pixels - background, axis=-1)
    if distance.max() < _MIN_CONTRAST:
        return Reading(None, None, background_name)

    # The pixels that differ most are inside the shape: its edges are mixed with the background.
    inside = distance >= 0.8 * np.quantile(distance, 0.98)
    colour = np.median(pixels[inside], axis=0)
    to_shape = colour - background
    share = (pixels - background) @ to_shape / max(float(to_shape @ to_shape), 1.0)
    mask = _without_specks(np.clip(share, 0, 1))

    overlaps = {name: _overlap(_in_box(mask), template) for name, template in _templates().items()}
    best = max(overlaps, key=lambda name: overlaps[name])
    shape = best if overlaps[best] >= MIN_OVERLAP else None
    return Reading(shape, _closest(colour, COLOURS), background_name)


def score(pictures: Iterable[Array], expected: Iterable[Scene]) -> Score:
    """Return the score of pictures that were drawn for the captions of scenes."""
    right: list[tuple[bool, bool, bool]] = []
    for picture, scene in zip(pictures, expected, strict=True):
        reading = read_picture(picture)
        right.append(
            (
                reading.shape == scene.shape,
                reading.colour == scene.colour,
                reading.background == scene.background,
            )
        )
    table = np.array(right, dtype=bool)
    shape, colour, background = (float(each) for each in table.mean(axis=0))
    return Score(shape, colour, background, float(table.all(axis=1).mean()))


class WorldScorer:
    """What a picture shows and what a caption describes, as a scorer for the evaluation of a LoRA.

    A feature has a one for the shape, the colour and the background, so the cosine of two features is the
    fraction of the three that they share. "No shape" and "no colour" are values like the others.
    """

    reads_texts: ClassVar[bool] = True

    _VALUES: ClassVar = ((*SHAPES, CONCEPT, None), (*COLOURS, None), tuple(BACKGROUNDS))

    def __init__(self) -> None:
        sources = [Path(__file__), Path(demo.world.__file__)]
        self.fingerprint = hashlib.sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()

    def picture_features(self, images: Sequence[Image.Image]) -> Array:
        """Return a float32 array (N, D) for RGB images."""
        readings = [read_picture(np.asarray(image.convert("RGB"))) for image in images]
        return self._features([(each.shape, each.colour, each.background) for each in readings])

    def text_features(self, texts: Sequence[str]) -> Array:
        """Return a float32 array (N, D) for captions of the demo's world; zeros for any other text."""
        scenes = [scene_of(text) for text in texts]
        return self._features([each and (each.shape, each.colour, each.background) for each in scenes])

    def _features(self, contents: Sequence[tuple[str | None, str | None, str] | None]) -> Array:
        features = np.zeros((len(contents), sum(map(len, self._VALUES))), dtype=np.float32)
        for row, content in enumerate(contents):
            start = 0
            for values, value in zip(self._VALUES, content or (), strict=False):
                if value in values:
                    features[row, start + values.index(value)] = 1.0
                start += len(values)
        return features


def _closest(colour: Array, names: Mapping[str, tuple[int, int, int]]) -> str:
    return min(names, key=lambda name: float(np.linalg.norm(colour - np.array(names[name]))))


def _without_specks(mask: Array) -> Array:
    labelled: Any = ndimage.label(mask > _EDGE)
    labels, number = labelled
    if number < 2:
        return mask
    sizes = np.bincount(labels.ravel())
    sizes[0] = 0
    specks = sizes < _MIN_PART * sizes.max()
    specks[0] = False
    return np.where(specks[labels], 0.0, mask)


@cache
def _templates() -> dict[str, Array]:
    return {name: _in_box(shape_mask(name)) for name in (*SHAPES, CONCEPT)}


def _in_box(mask: Array) -> Array:
    """Return the part of a mask (H, W) in a square around its bounding box, scaled to `_BOX_PX`."""
    rows, columns = (np.flatnonzero((mask > _EDGE).any(axis=axis)) for axis in (1, 0))
    if not len(rows):
        return np.zeros((_BOX_PX, _BOX_PX), dtype=np.float32)
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    half = max(bottom - top, right - left) / 2 + _BOX_MARGIN_PX
    y, x = (top + bottom) / 2, (left + right) / 2

    # A square that reaches beyond the picture is completed with background.
    margin = math.ceil(half)
    padded = Image.fromarray(np.pad(mask.astype(np.float32), margin))
    centre_x, centre_y = x + margin, y + margin
    square = (centre_x - half, centre_y - half, centre_x + half, centre_y + half)
    scaled = padded.resize((_BOX_PX, _BOX_PX), Image.Resampling.BILINEAR, box=square)
    return np.asarray(scaled)


def _overlap(left: Array, right: Array) -> float:
    """Return the intersection over union of two masks with values in [0, 1]."""
    return float(np.minimum(left, right).sum() / np.maximum(left, right).sum())
