"""Checks of vae_latents on masks: each masked row has its entry, and the crop keeps most of the mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.mask_requests import has_mask, mask_keys, mask_sources, mask_spec
from pipeline.cache.requests import STAT_COLUMNS, STATS, RecipeEntries
from pipeline.checks.findings import Outcome
from pipeline.encoding.checks import Problems
from pipeline.errors import counted
from pipeline.vae_latents.masks import kept_fraction

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

MASK_TABLE_COLUMNS = ("mask_mean", "mask_key", "mask_ppm", *(f"mask_{name}" for name in STAT_COLUMNS))
"""Columns of vae_latents that the checks on masks use, in addition to `mask_hash`."""

MIN_KEPT = 0.5
"""Fraction of a mask's weight inside the crop below which a warning names the mask."""

_ROW = ("sample_id", "bucket", "flipped")


def missing_masks(
    entries: RecipeEntries, table: pl.DataFrame, expected: pl.DataFrame
) -> Iterator[dict[str, Any]]:
    """Yield rows of a dataset with masks whose mask is missing or is not the one of aspect_buckets."""
    masked = list(mask_sources(entries.recipe))
    if not masked:
        return
    required = expected.filter(pl.col("dataset").is_in(masked))
    keys = required.select(*_ROW).with_columns(expected=mask_keys(entries, required))
    stored = table.select(*_ROW, stored=table["mask_key"] if "mask_key" in table.columns else pl.lit(None))
    both = keys.join(stored, on=_ROW, how="inner", maintain_order="left")
    wrong = both.filter(pl.col("expected").is_null() | pl.col("expected").ne_missing(pl.col("stored")))
    for sample_id in wrong["sample_id"].unique(maintain_order=True):
        yield {"sample_id": sample_id, "problem": "its mask is missing or outdated"}


def mask_entry_problems(entries: RecipeEntries, table: pl.DataFrame) -> Problems:
    """Check the cache entry of each mask.

    Raises:
        StoreError: An entry cannot be read.
    """
    used = table.filter(has_mask(entries.recipe, table))
    if "mask_key" not in used.columns:
        used = used.clear().with_columns(pl.lit(None).alias(name) for name in MASK_TABLE_COLUMNS)
    used = used.filter(used["mask_key"] == mask_keys(entries, used))
    recorded = {f"mask_{name}": name for name in STATS}
    used = used.drop("key", *STAT_COLUMNS).rename({"mask_key": "key", **recorded})
    used = used.unique("key", keep="first", maintain_order=True)
    num_bytes = [mask_spec(entries, row).file_bytes for row in used.iter_rows(named=True)]
    used = used.with_columns(pl.Series("num_bytes", num_bytes, dtype=pl.Int64))
    return Problems(entries.store, "masks", used, lambda row: mask_spec(entries, row), log=entries.log)


def cropped_masks(recipe: Recipe, table: pl.DataFrame) -> Outcome:
    """Return the masks of which the crop keeps less than `MIN_KEPT`."""
    used = table.filter(has_mask(recipe, table))
    if used.is_empty() or "mask_ppm" not in used.columns:
        return Outcome(True, "no sample has a mask")
    lost = used.filter(~pl.col("flipped")).select("sample_id", "bucket", kept=kept_fraction().round(3))
    lost = lost.filter(pl.col("kept") < MIN_KEPT).sort("kept", "sample_id")
    numbers = {"cropped": len(lost)}
    if lost.is_empty():
        return Outcome(True, f"the crops keep at least {MIN_KEPT:.0%} of each mask", numbers=numbers)
    masks = counted(len(lost), "mask loses", "masks lose")
    first, _, kept = lost.row(0)
    summary = f"{masks} more than half of its weight to the crop, first {first}, which keeps {kept:.1%}"
    fix = "use buckets.crop: focus with datasets[].focus_columns, or more bucket sizes"
    return Outcome(False, summary, fix, lost.rows(named=True), numbers)
