"""A scorer without a model: the mean colours of the quarters of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image


class ColourScorer:
    """Features of 12 values: red, green and blue of each quarter."""

    reads_texts = False

    def __init__(self, weights: str = "") -> None:
        self.fingerprint = f"colours {weights}"

    def picture_features(self, images: Sequence[Image]) -> npt.NDArray[np.float32]:
        quarters = [np.asarray(image.resize((2, 2)), np.float32).ravel() / 255 for image in images]
        return np.stack(quarters)

    def text_features(self, texts: Sequence[str]) -> None:
        return None


class GreyScorer(ColourScorer):
    """Features of 4 values: the brightness of each quarter."""

    def __init__(self) -> None:
        super().__init__("grey")

    def picture_features(self, images: Sequence[Image]) -> npt.NDArray[np.float32]:
        return super().picture_features(images).reshape(len(images), 4, 3).mean(axis=2) + np.float32(0.1)
