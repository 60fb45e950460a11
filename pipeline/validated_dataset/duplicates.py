"""Group images with equal or similar content by a perceptual hash.

Two images are similar if their hashes (`images.pixel_values`) differ in at most a few bits, and similarity is
transitive.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.log import Log, discard
from pipeline.reporting.progress import progress

HASH_BITS = 64

VIEW_BITS = 10
"""Maximum number of bits in which the hashes of neighbouring views of a scene differ."""

MAX_VIEWS = 5_000
"""Maximum number of contents that are grouped by view; twice as many take four times as long."""

Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]


def duplicate_groups(contents: pl.DataFrame, distance: int, *, log: Log = discard) -> pl.DataFrame:
    """Return each content's group of similar contents.

    Args:
        contents: Columns content_hash (unique) and perceptual_hash (may be null).
        distance: Maximum number of bits in which the hashes of similar contents differ, 0 to 16.
        log: Receives the progress.

    Returns:
        Columns content_hash, in the given order, and duplicate_group: the smallest content hash of the group,
        which is the content's own hash if nothing is similar to it.
    """
    hashed = contents.drop_nulls("perceptual_hash")

    # Equal hashes are one value, since a dataset of frames from a video may have thousands of each.
    values, indices = np.unique(hashed["perceptual_hash"].to_numpy(), return_inverse=True)
    labels = _components(values, distance, log)[indices]

    # Most images are similar to no other, and get their own hash below.
    similar = hashed.with_columns(label=labels).filter(pl.col("label").is_duplicated())
    groups = similar.select("content_hash", duplicate_group=pl.col("content_hash").min().over("label"))
    return (
        contents.select("content_hash")
        .join(groups, on="content_hash", how="left", maintain_order="left")
        .with_columns(pl.col("duplicate_group").fill_null(pl.col("content_hash")))
    )


def view_groups(contents: pl.DataFrame, *, log: Log = discard) -> pl.Series:
    """Return each content's group of near views, as `view_group`; null for more than `MAX_VIEWS` contents."""
    if len(contents) > MAX_VIEWS:
        return pl.Series("view_group", [None] * len(contents), dtype=pl.String)
    return duplicate_groups(contents, VIEW_BITS, log=log)["duplicate_group"].alias("view_group")


def _components(values: Hashes, distance: int, log: Log) -> Indices:
    """Return, for each of the distinct values, the smallest index in its connected component."""
    # If two values differ in at most d bits, at least one of d + 1 parts of them is equal. So only values
    # with an equal part are compared.
    labels = np.arange(len(values))
    bounds = np.linspace(0, HASH_BITS, distance + 2).astype(np.uint64)
    num_compared = 0

    # Counted before, so that progress has a total. It costs one sort per part.
    num_pairs = sum(_num_equal_pairs(_part(values, low, high)) for low, high in pairwise(bounds))
    with progress(lambda: num_compared, num_pairs, "pairs of images compared", log=log):
        for low, high in pairwise(bounds):
            parts = _part(values, low, high)
            order = np.argsort(parts, kind="stable")
            sorted_parts = parts[order]

            # Values with an equal part are adjacent: compare each with the first, second, ... value after it.
            first = np.arange(len(values))
            for offset in range(1, len(values)):
                first = first[first + offset < len(values)]
                first = first[sorted_parts[first] == sorted_parts[first + offset]]
                if not len(first):
                    break
                one, other = order[first], order[first + offset]
                is_similar = np.bitwise_count(values[one] ^ values[other]) <= distance
                _merge(labels, one[is_similar], other[is_similar])
                num_compared += len(first)
    return labels


def _part(values: Hashes, low: np.uint64, high: np.uint64) -> Hashes:
    """Return the bits of each hash from `low` up to `high`, exclusively; bit 0 is the lowest."""
    return values << (np.uint64(HASH_BITS) - high) >> (np.uint64(HASH_BITS) - high + low)


def _num_equal_pairs(parts: Hashes) -> int:
    """Return the number of pairs of equal elements."""
    counts = np.unique(parts, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def _merge(labels: Indices, one: Indices, other: Indices) -> None:
    """Give each connected pair of values one label, the smallest; union-find on arrays."""
    while len(one):
        smallest = np.minimum(labels[one], labels[other])
        np.minimum.at(labels, labels[one], smallest)
        np.minimum.at(labels, labels[other], smallest)
        while (labels[labels] != labels).any():
            labels[:] = labels[labels]
        is_apart = labels[one] != labels[other]
        one, other = one[is_apart], other[is_apart]
