"""Select the images to use by size, by the manifest's columns and by a limit.

The recipe requests these exclusions, so they do not count towards the rejected fraction. Each excluded image
is listed among the rejected samples with the name of its filter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl

from pipeline.raw_images.manifest import composed_paths
from pipeline.storage.tables.schemas import FILTER_PREFIX, REJECTED

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings, FilterSettings, Recipe

_MEASURES: dict[str, pl.Expr] = {
    "width": pl.col("width").cast(pl.Int64),
    "height": pl.col("height").cast(pl.Int64),
    "pixels": pl.col("width").cast(pl.Int64) * pl.col("height"),
    "aspect_ratio": pl.col("width") / pl.col("height"),
}
"""The measure that each pair of `min_` and `max_` filters limits."""


def select(
    recipe: Recipe, raw: pl.DataFrame, manifests: Mapping[str, pl.DataFrame], *, stage: str
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the rows of raw_images to use, and rejected rows of `stage`.

    An image is rejected for the first filter, in the order of the recipe reference, that it does not pass. A
    limit applies to the images that pass all filters. It takes those with the smallest content hashes, and
    with `duplicates: keep_first`, copies last.

    `manifests` holds the `selected_rows` of the datasets with `filters.where`.
    """
    kept: list[pl.DataFrame] = []
    rejected: list[pl.DataFrame] = []
    for settings in recipe.datasets:
        rows = raw.filter(pl.col("dataset") == settings.name)
        reason = _first_reason(settings, manifests.get(settings.name))
        rows = rows.with_columns(reason=_limited(settings, rows.with_columns(reason=reason)))
        kept.append(rows.filter(pl.col("reason").is_null()).drop("reason"))
        rejected.append(_rejected(rows.drop_nulls("reason"), settings, stage))
    return pl.concat(kept).sort("sample_id"), pl.concat(rejected)


def _first_reason(settings: DatasetSettings, manifest: pl.DataFrame | None) -> pl.Expr:
    """Return an expression: the name of the first filter that an image does not pass, or null."""
    # Each filter wraps the earlier expression, so the last one has priority: filters are added in reverse.
    reason: pl.Expr = pl.lit(None, dtype=pl.String)
    if settings.filters.where is not None:
        assert manifest is not None
        ids = [f"{settings.name}/{path}" for path in composed_paths(settings, manifest)]
        reason = (
            pl.when(~pl.col("sample_id").is_in(ids)).then(pl.lit(f"{FILTER_PREFIX}where")).otherwise(reason)
        )
    for name, limit in reversed(_size_filters(settings.filters)):
        measure = _MEASURES[name[4:]]
        is_beyond = measure < limit if name.startswith("min_") else measure > limit
        reason = pl.when(is_beyond).then(pl.lit(f"{FILTER_PREFIX}{name}")).otherwise(reason)
    return reason


def _limited(settings: DatasetSettings, rows: pl.DataFrame) -> pl.Series:
    """Return the column `reason` with the limit applied to the rows where it is null."""
    if settings.limit is None:
        return rows["reason"]

    # By content, so that the choice looks random, and that renaming files or adding images changes it as
    # little as possible.
    passed = rows.filter(pl.col("reason").is_null()).sort("content_hash", "sample_id")

    # Most copies are removed afterwards, so they should not fill the limit.
    if settings.duplicates == "keep_first":
        passed = passed.sort(~pl.col("content_hash").is_first_distinct(), maintain_order=True)
    is_over = pl.col("sample_id").is_in(passed["sample_id"][settings.limit :].implode())
    reason = pl.when(is_over).then(pl.lit(f"{FILTER_PREFIX}limit")).otherwise("reason")
    return rows.select(reason.alias("reason")).to_series()


def _size_filters(filters: FilterSettings) -> list[tuple[str, float]]:
    names = [f"{end}_{measure}" for measure in _MEASURES for end in ("min", "max")]
    return [(name, value) for name in names if (value := getattr(filters, name)) is not None]


def _rejected(rows: pl.DataFrame, settings: DatasetSettings, stage: str) -> pl.DataFrame:
    filters = [(name, f"filters.{name}", value) for name, value in _size_filters(settings.filters)]
    filters += [("where", "filters.where", settings.filters.where), ("limit", "limit", settings.limit)]
    limits = {f"{FILTER_PREFIX}{name}": f"{key} is {value}" for name, key, value in filters}
    fixes = {
        f"{FILTER_PREFIX}{name}": f"change {key} of dataset {settings.name}, now {value}"
        for name, key, value in filters
    }
    size = pl.format("the image is {}x{} (height x width), and ", "height", "width")
    return rows.select(
        "sample_id",
        "dataset",
        "path",
        stage=pl.lit(stage),
        reason="reason",
        detail=size + pl.col("reason").replace_strict(limits, return_dtype=pl.String),
        fix=pl.col("reason").replace_strict(fixes, return_dtype=pl.String),
        content_hash="content_hash",
    ).cast(pl.Schema(REJECTED))
