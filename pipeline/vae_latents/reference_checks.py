"""Checks of vae_latents on reference images: each row has the entries of its references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from pipeline.cache.reference_requests import (
    IMAGES,
    KEYS,
    STATS_TEXT,
    has_references,
    of_references,
    reference_keys,
    reference_rows,
)
from pipeline.cache.requests import TARGET, RecipeEntries, with_recorded
from pipeline.encoding.checks import Problems
from pipeline.vae_latents.references import recorded_references

REFERENCE_TABLE_COLUMNS = (KEYS, STATS_TEXT)
"""Columns of vae_latents that the checks on references use, in addition to `IMAGES`."""

_ROW = ("sample_id", "bucket", "flipped")


def missing_references(
    entries: RecipeEntries, table: pl.DataFrame, expected: pl.DataFrame
) -> Iterator[dict[str, Any]]:
    """Yield samples whose references are missing, or are not those of aspect_buckets in this order."""
    datasets = [dataset.name for dataset in entries.recipe.datasets if dataset.references]
    if not datasets:
        return
    required = expected.filter(pl.col("dataset").is_in(datasets))
    keys = required.select(*_ROW).with_columns(expected=reference_keys(entries, required))
    stored = table.select(*_ROW, stored=table[KEYS] if KEYS in table.columns else pl.lit(None))
    both = keys.join(stored, on=_ROW, how="inner", maintain_order="left")
    wrong = both.filter(pl.col("expected").is_null() | pl.col("expected").ne_missing(pl.col("stored")))
    for sample_id in wrong["sample_id"].unique(maintain_order=True):
        problem = "its references are missing or outdated: they or their settings have changed since"
        yield {"sample_id": sample_id, "problem": problem}


def reference_entry_problems(entries: RecipeEntries, table: pl.DataFrame) -> Problems:
    """Check the cache entry of each reference that vae_latents recorded.

    Raises:
        StoreError: An entry cannot be read.
    """
    used = table.filter(has_references(entries.recipe, table))
    if KEYS in used.columns:
        used = used.filter(used[KEYS] == reference_keys(entries, used))
    else:
        used = used.clear().with_columns(pl.lit(None, pl.String).alias(IMAGES))
    of_mean = of_references(entries)
    rows = reference_rows(entries, used).unique("key", keep="first", maintain_order=True)
    sizes = of_mean.latent_shapes(rows).select(*TARGET, "num_bytes")
    rows = rows.join(sizes, on=TARGET, how="left", maintain_order="left")
    recorded = with_recorded(rows, recorded_references(used))
    return Problems(entries.store, "latents", recorded, of_mean.latent_spec, log=entries.log)
