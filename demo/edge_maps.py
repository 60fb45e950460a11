"""A scorer of outlines, which sees the position and the size of what a picture shows.

In the recipe it is `demo.edge_maps:EdgeScorer`. The cosine of two features is the correlation of the strength
of edges, place by place. It is made for `copies`: the edges of a copy are at the same places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

_EDGE_PX = 32
"""Edge of the scaled picture."""


class EdgeScorer:
    """Strengths of edges, minus their mean. It reads no texts."""

    fingerprint: ClassVar[str] = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    reads_texts: ClassVar[bool] = False

    def picture_features(self, images: Sequence[Image.Image]) -> Floats:
        """Return a float32 array (N, D) for RGB images."""
        return np.stack([_feature(image) for image in images])

    def text_features(self, texts: Sequence[str]) -> None:
        """Return None: the scorer reads no texts."""


def _feature(image: Image.Image) -> Floats:
    scaled = image.convert("RGB").resize((_EDGE_PX, _EDGE_PX), Image.Resampling.BOX)
    down, right = np.gradient(np.asarray(scaled, dtype=np.float32), axis=(0, 1))
    # The channel with the steepest gradient, so that a shape as bright as its background has edges.
    strengths = np.hypot(down, right).max(axis=-1).ravel()
    return strengths - strengths.mean()
