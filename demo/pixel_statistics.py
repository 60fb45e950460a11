"""A scorer for the evaluation of a LoRA that knows nothing of the demo's world: statistics of pixels.

In the recipe it is `demo.pixel_statistics:PixelScorer`. A feature has two halves of equal weight: histograms
of oriented gradients (Dalal and Triggs, Histograms of Oriented Gradients for Human Detection, CVPR 2005) for
shapes, and the mean colours of the same cells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

_EDGE_PX = 64
_CELLS = 8
"""Cells per edge."""

_DIRECTIONS = 9


class PixelScorer:
    """Gradients and colours of the cells of a picture. It reads no texts."""

    fingerprint: ClassVar[str] = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    reads_texts: ClassVar[bool] = False

    def picture_features(self, images: Sequence[Image.Image]) -> Floats:
        """Return a float32 array (N, D) for RGB images."""
        return np.stack([_feature(image) for image in images])

    def text_features(self, texts: Sequence[str]) -> None:
        """Return None: the scorer reads no texts."""


def _feature(image: Image.Image) -> Floats:
    scaled = image.convert("RGB").resize((_EDGE_PX, _EDGE_PX), Image.Resampling.BOX)
    pixels = np.asarray(scaled, dtype=np.float32) / 255
    colours = _cells(pixels).mean(axis=1) - 0.5

    # The channel with the steepest gradient decides, so that a shape as bright as its background has edges.
    down, right = np.gradient(pixels, axis=(0, 1))
    steepness = np.hypot(down, right)
    steepest = steepness.argmax(axis=-1)[..., None]
    down, right, strength = (
        np.take_along_axis(each, steepest, axis=-1)[..., 0] for each in (down, right, steepness)
    )

    # Directions are angles of 0 to 180 degrees: a dark shape has the edges of a bright one.
    angles = np.arctan2(down, right) % np.pi
    bins = np.minimum((angles / np.pi * _DIRECTIONS).astype(int), _DIRECTIONS - 1)
    histograms = _cells(np.eye(_DIRECTIONS, dtype=np.float32)[bins] * strength[..., None]).sum(axis=1)
    return np.concatenate([_unit(histograms), _unit(colours)])


def _cells(values: Any) -> Any:
    """Return values (H, W, C) as an array (cells, pixels of a cell, C)."""
    size = _EDGE_PX // _CELLS
    channels = values.shape[-1]
    split = values.reshape(_CELLS, size, _CELLS, size, channels).swapaxes(1, 2)
    return split.reshape(_CELLS * _CELLS, size * size, channels)


def _unit(values: Any) -> Floats:
    # Roots, so that a few steep edges do not outweigh all others.
    flat = np.sqrt(np.abs(values)) * np.sign(values)
    norm = float(np.linalg.norm(flat))
    return (flat / norm if norm > 0 else flat).ravel().astype(np.float32)
