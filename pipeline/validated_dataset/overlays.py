"""Find a watermark, logo or date that many images have in the same corner.

Each image has a print of its corners: the cells that are lighter or darker than their neighbourhood
(`images.pixel_measures.corners`). In images that share nothing but an overlay, the signs of a cell add up to
little unless the overlay decides them. Dekel et al., On the Effectiveness of Visible Watermarks, 2017, add
gradients for the same reason.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import polars as pl

from pipeline.images.pixel_measures import signs_of_corners

Array: TypeAlias = "np.ndarray[Any, Any]"

MIN_IMAGES = 16
"""Minimum number of images; in fewer, cells agree by chance."""

MAX_IMAGES = 1_000
"""Maximum number of images in which an overlay is searched."""

MIN_SUM = 0.5
"""Minimum sum of a cell's signs, as a fraction of the images."""

MIN_DEVIATIONS = 3.0
"""Minimum sum of a cell's signs in standard deviations of a sum of random signs."""

MIN_CELLS = 8
"""Minimum number of such cells in one corner."""


def agreement(contents: pl.DataFrame, is_first: pl.Series) -> pl.Series:
    """Return as `overlay` how far each content agrees with an overlay in a corner: -1 to 1.

    All are null if there is none.

    Args:
        contents: Columns content_hash and corners.
        is_first: False for contents that look like an earlier one: they share more than an overlay.
    """
    none = pl.Series("overlay", [None] * len(contents), dtype=pl.Float64)
    prints = contents.filter(is_first & contents["corners"].is_not_null())
    if len(prints) < MIN_IMAGES:
        return none

    # By content, so that the order of the images does not matter.
    searched = prints.bottom_k(MAX_IMAGES, by="content_hash")["corners"]
    expected = _overlay(np.stack([signs_of_corners(text) for text in searched]))
    if not expected.any():
        return none
    is_overlay = expected != 0
    values = [
        None if text is None else float((signs_of_corners(text) * expected)[is_overlay].mean())
        for text in contents["corners"]
    ]
    return pl.Series("overlay", values, dtype=pl.Float64)


def _overlay(signs: Array) -> Array:
    """Return the sign of each cell of an overlay, 0 for others; `signs` is (images, 4, height, width)."""
    number = len(signs)
    sums = signs.sum(axis=0, dtype=np.int32)
    is_overlay = np.abs(sums) >= max(MIN_SUM * number, MIN_DEVIATIONS * number**0.5)
    is_overlay &= (is_overlay.sum(axis=(1, 2)) >= MIN_CELLS)[:, None, None]
    return np.sign(sums) * is_overlay
