"""Images that are the same, or look the same: groups by perceptual hash.

The hash is pHash as the library ImageHash has it (the signs of 8x8 low frequencies around their median), 64
bits of which scaling, recompressing or a change of brightness moves few. Two images with at most a few
different bits look alike, and looking alike is taken as transitive.

The library computes it with SciPy, whose import takes longer than hashing a hundred photographs, and lets
rounding decide the bits of frequencies that are equal in exact arithmetic, such as those of a drawing that
are zero. Here the transform is a matrix product, and equal frequencies are equal; where none are, the bits
are the library's.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from PIL import Image

HASH_BITS = 64

_SMALL_EDGE_PX = 64
"""An image is averaged down to at least this, which costs a tenth of converting it whole."""

_SAMPLED_EDGE_PX = 512
"""Of a larger image every n-th pixel is averaged: all of 8 megapixels takes a seventh of their decoding.
On 40 photographs and copies at two thirds of their size the bits differ as much as without, at most 4."""

_EDGE = 8
"""Frequencies along each axis that are looked at, the lowest."""

_GREY_EDGE_PX = 4 * _EDGE

_COSINES = 2 * np.cos(
    np.pi / (2 * _GREY_EDGE_PX) * np.outer(np.arange(_EDGE), 2 * np.arange(_GREY_EDGE_PX) + 1)
)
"""The first rows of the discrete cosine transform, type II:
y[k] = 2 sum over n of x[n] cos(pi k (2n + 1) / 2N); see SciPy's reference of `scipy.fft.dct`."""

_EQUAL = 1e-6
"""Frequencies are sums of 1,024 levels and at most 10^6; rounding moves them by less than 10^-8."""

_NEAREST, _LANCZOS = Image.Resampling.NEAREST, Image.Resampling.LANCZOS

Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]


def perceptual_hash(image: Image.Image) -> int | None:
    """64 bits; None for an image of one colour, which has no features.

    Args:
        image: RGB, of any size.
    """
    step = min(image.size) // _SAMPLED_EDGE_PX
    if step > 1:
        image = image.resize((image.width // step, image.height // step), _NEAREST)
    shrink = min(image.size) // _SMALL_EDGE_PX
    small = image.reduce(shrink) if shrink > 1 else image
    extrema: Any = small.getextrema()
    if all(low == high for low, high in extrema):
        return None
    grey = small.convert("L").resize((_GREY_EDGE_PX, _GREY_EDGE_PX), _LANCZOS)
    levels = np.frombuffer(grey.tobytes(), dtype=np.uint8).reshape(_GREY_EDGE_PX, _GREY_EDGE_PX)
    low = (_COSINES @ levels @ _COSINES.T).ravel()
    ordered = np.sort(low)
    median = (ordered[HASH_BITS // 2 - 1] + ordered[HASH_BITS // 2]) / 2
    return int.from_bytes(np.packbits(low > median + _EQUAL).tobytes(), "big")


def duplicate_groups(contents: pl.DataFrame, distance: int) -> pl.DataFrame:
    """For each content the group of those that look like it.

    Args:
        contents: `content_hash`, each once, and `perceptual_hash`, null where there is none.
        distance: Bits in which the hashes of two that look alike may differ, 0 to 16.

    Returns:
        In the same order, `content_hash` and `duplicate_group`, the smallest content hash of the group; its
        own where nothing looks like it.
    """
    places = contents["perceptual_hash"].is_not_null().arg_true().to_numpy()
    values, inverse = np.unique(contents["perceptual_hash"].drop_nulls().to_numpy(), return_inverse=True)
    numbers = _components(values, distance)[inverse]
    has_other = np.bincount(numbers)[numbers] > 1
    alike = (
        contents[places[has_other]]
        .select("content_hash")
        .with_columns(place=pl.Series(places[has_other]), number=pl.Series(numbers[has_other]))
    )
    alike = alike.sort("number", "content_hash").with_columns(first=pl.col("place").first().over("number"))
    place = np.arange(len(contents))
    place[alike["place"].to_numpy()] = alike["first"].to_numpy()
    return contents.select("content_hash", duplicate_group=contents["content_hash"].gather(place))


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
