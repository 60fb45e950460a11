"""The pairs of images of a slider: one that positive scales of the LoRA should draw, and its opposite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

_SUFFIX = r"\.[^./]*$"


def slider_scales(recipe: Recipe) -> dict[str, int]:
    """Return the scale of each dataset that has one, by the dataset's name."""
    return {each.name: each.slider for each in recipe.datasets if each.slider is not None}


def with_pairs(rows: pl.DataFrame, scales: dict[str, int], *other_keys: str) -> pl.DataFrame:
    """Add the columns `slider` (Int8) and `pair` (String) to rows with sample_id, dataset and bucket.

    `slider` is the scale of the row's dataset, or null. Rows of both scales form a pair if they have the same
    bucket, the same values of `other_keys`, and the same path in their datasets apart from the suffix. `pair`
    is the same for both, and null for rows without a partner.
    """
    scale = pl.col("dataset").replace_strict(scales, default=None, return_dtype=pl.Int8)
    path = pl.col("sample_id").str.slice(pl.col("dataset").str.len_chars() + 1)

    # A pair shares noise, which has the shape of the bucket, so both images must have the same bucket.
    name = pl.format("{} ({})", path.str.replace(_SUFFIX, ""), "bucket")
    rows = rows.with_columns(slider=scale, pair=name)
    has_partner = pl.col("slider").drop_nulls().n_unique().over("pair", *other_keys) == 2
    return rows.with_columns(pair=pl.when(has_partner & pl.col("slider").is_not_null()).then("pair"))
