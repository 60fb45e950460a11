"""Which samples are held out for validation: decided by what an image holds, look-alikes together.

Whoever counts what an epoch draws counts `times_drawn`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings


def held_out(samples: pl.DataFrame, fractions: Mapping[str, float]) -> pl.Series:
    """For each sample whether it is for validation, and never trained on.

    A group is held out or trained on as a whole. One that several datasets share is held out only if all of
    them would: a dataset that asks for no validation loses no image to it.

    Args:
        samples: `dataset` and `duplicate_group`.
        fractions: Of each dataset, about which share is held out.
    """
    if not any(fractions.values()):
        return pl.repeat(value=False, n=len(samples), eager=True)
    groups = (
        samples.select("duplicate_group", fraction=_of_dataset(fractions))
        .group_by("duplicate_group")
        .agg(pl.col("fraction").min())
        .filter(pl.col("fraction") > 0.0)
    )
    chosen = [group for group, share in groups.rows() if _place(group) < share]
    return samples["duplicate_group"].is_in(chosen)


def times_drawn(samples: pl.DataFrame, datasets: Iterable[DatasetSettings]) -> pl.Series:
    """For each sample how often an epoch draws it: its dataset's repeats, 0 where it is held out.

    Args:
        samples: `dataset`, and `duplicate_group` where a dataset holds some out.
        datasets: The recipe's; samples of others are drawn once.
    """
    settings = list(datasets)
    repeats = {each.name: each.repeats for each in settings}
    times = samples.select(
        times=pl.col("dataset").replace_strict(repeats, default=1, return_dtype=pl.Int64)
    ).to_series()
    held = held_out(samples, {each.name: each.validation_fraction for each in settings})
    return times * (~held).cast(pl.Int64)


def _place(group: str) -> float:
    """A number in [0, 1) that looks random and is the same everywhere."""
    digest = hashlib.blake2b(f"held out\0{group}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def _of_dataset(fractions: Mapping[str, float]) -> pl.Expr:
    return pl.col("dataset").replace_strict(dict(fractions), default=0.0, return_dtype=pl.Float64)
