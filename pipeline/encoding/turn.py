"""The order in which missing entries are made."""

from __future__ import annotations

import polars as pl

from pipeline.cache.requests import LATENT_SHAPE


def in_turn(rows: pl.DataFrame) -> pl.DataFrame:
    """The probes first, then the costliest first, jobs of one shape one after the other.

    The probes are the costliest job, the cheapest one and the first one by name, as far as these differ: what
    is wrong with the model or the settings shows within seconds. The answer depends on the jobs alone, not on
    how they are ordered.

    Args:
        rows: A row a job: `cost`, `name`, `key`, and the `LATENT_SHAPE` where shapes differ.
    """
    if rows.is_empty():
        return rows
    shape = [name for name in LATENT_SHAPE if name in rows.columns]
    ordered = rows.sort("cost", *shape, "key", descending=[True, *(False for _ in shape), False])
    first_by_name = ordered.with_row_index("place").sort("name", "key")["place"][0]
    probes = list(dict.fromkeys((0, len(ordered) - 1, first_by_name)))
    others = ordered.with_row_index("place").filter(~pl.col("place").is_in(probes)).drop("place")
    return ordered[probes].vstack(others)
