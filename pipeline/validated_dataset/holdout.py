"""Choose the samples held out for the validation loss, keeping similar images together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings


def held_out(samples: pl.DataFrame, fractions: Mapping[str, float]) -> pl.Series:
    """Return for each sample whether it is held out, that is, never trained on.

    A group of similar images is held out or trained on together. A group that several datasets share is held
    out only if each of them would hold it out.

    Args:
        samples: Columns dataset and duplicate_group.
        fractions: Approximate fraction to hold out, by dataset.
    """
    if not any(fractions.values()):
        return pl.repeat(value=False, n=len(samples), eager=True)
    fraction = pl.col("dataset").replace_strict(dict(fractions), default=0.0, return_dtype=pl.Float64)

    # The smallest fraction decides, so that a dataset without validation never loses an image to another.
    groups = (
        samples.select("duplicate_group", fraction=fraction)
        .group_by("duplicate_group")
        .agg(pl.col("fraction").min())
        .filter(pl.col("fraction") > 0.0)
    )

    # A group's position is fixed, so raising the fraction only adds groups to the holdout.
    chosen = [group for group, fraction in groups.rows() if _position(group) < fraction]
    return samples["duplicate_group"].is_in(chosen)


def times_drawn(samples: pl.DataFrame, datasets: Iterable[DatasetSettings]) -> pl.Series:
    """Return how often an epoch draws each sample: its dataset's repeats, or 0 if it is held out.

    Args:
        samples: Columns dataset and, if a dataset holds samples out, duplicate_group.
        datasets: The recipe's datasets. Samples of other datasets are drawn once.
    """
    settings = list(datasets)
    repeats = {each.name: each.repeats for each in settings}
    times = samples.select(
        times=pl.col("dataset").replace_strict(repeats, default=1, return_dtype=pl.Int64)
    ).to_series()
    is_held_out = held_out(samples, {each.name: each.validation_fraction for each in settings})
    return times * (~is_held_out).cast(pl.Int64)


def _position(group: str) -> float:
    """Return a pseudo-random number in [0, 1) that depends only on the group."""
    digest = hashlib.blake2b(f"held out\0{group}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64
