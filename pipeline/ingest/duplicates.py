"""Images that are the same, or look the same: groups by perceptual hash.

The hash is pHash as the library ImageHash has it (the signs of 8x8 low frequencies around their median), 64
bits of which scaling, recompressing or a change of brightness moves few. Two images with at most a few
different bits look alike, and looking alike is taken as transitive.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

if TYPE_CHECKING:
    from PIL import Image

HASH_BITS = 64

HASH_VERSION = "look-2"
"""Of `perceptual_hash`: hashes of another version are made anew, which decodes every image once more."""

_SMALL_EDGE_PX = 64
"""An image is averaged down to at least this, which costs a tenth of converting it whole."""

_SAMPLED_EDGE_PX = 512
"""Of a larger image every n-th pixel is averaged: all of 8 megapixels takes a seventh of their decoding.
On 40 photographs and copies at two thirds of their size the bits differ as much as without, at most 4."""

Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]


def perceptual_hash(image: Image.Image) -> int | None:
    """64 bits; None for an image of one colour, which has no features.

    Args:
        image: RGB, of any size.
    """
    from imagehash import phash  # half a second with SciPy, and only new images need it

    step = min(image.size) // _SAMPLED_EDGE_PX
    if step > 1:
        from PIL import Image

        image = image.resize((image.width // step, image.height // step), Image.Resampling.NEAREST)
    small = image.reduce(max(1, min(image.size) // _SMALL_EDGE_PX))
    extrema: Any = small.getextrema()
    if all(low == high for low, high in extrema):
        return None
    return int(str(phash(small)), 16)


def duplicate_groups(contents: pl.DataFrame, distance: int) -> pl.DataFrame:
    """For each content the group of those that look like it.

    Args:
        contents: `content_hash`, each once, and `perceptual_hash`, null where there is none.
        distance: Bits in which the hashes of two that look alike may differ, 0 to 16.

    Returns:
        `content_hash` and `duplicate_group`, the smallest content hash of the group; its own where nothing
        looks like it.
    """
    hashes = contents["perceptual_hash"].drop_nulls().unique().sort()
    values = hashes.to_numpy()
    numbered = pl.DataFrame({"perceptual_hash": hashes, "number": _components(values, distance)})
    return (
        contents.join(numbered, on="perceptual_hash", how="left", maintain_order="left")
        .with_columns(smallest=pl.col("content_hash").min().over("number"))
        .select(
            "content_hash",
            duplicate_group=pl.when(pl.col("number").is_null()).then("content_hash").otherwise("smallest"),
        )
    )


def _components(values: Hashes, distance: int) -> Indices:
    """For each of the distinct values the smallest index of those that it is connected with.

    Of two values that differ in at most d bits, one of d + 1 parts is equal: only values that share a part
    are compared.
    """
    labels = np.arange(len(values))
    bounds = np.linspace(0, HASH_BITS, distance + 2).astype(np.uint64)
    for low, high in pairwise(bounds):
        parts = values << (np.uint64(HASH_BITS) - high) >> (np.uint64(HASH_BITS) - high + low)
        order = np.argsort(parts, kind="stable")
        ordered = parts[order]
        first = np.arange(len(values))
        for offset in range(1, len(values)):
            first = first[first + offset < len(values)]
            first = first[ordered[first] == ordered[first + offset]]
            if not len(first):
                break
            one, other = order[first], order[first + offset]
            near = np.bitwise_count(values[one] ^ values[other]) <= distance
            _join(labels, one[near], other[near])
    return labels


def _join(labels: Indices, one: Indices, other: Indices) -> None:
    """Let connected values have one label, the smallest."""
    while len(one):
        lower = np.minimum(labels[one], labels[other])
        np.minimum.at(labels, labels[one], lower)
        np.minimum.at(labels, labels[other], lower)
        while (labels[labels] != labels).any():
            labels[:] = labels[labels]
        apart = labels[one] != labels[other]
        one, other = one[apart], other[apart]
