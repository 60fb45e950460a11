"""Which of the images found are used: by their size, by what a listing says of them, and by a limit.

What is left out was asked for, so it says nothing bad of a dataset and counts against no share of rejected
samples; each is listed among the rejected with the filter's name all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl

from pipeline.raw_images.manifest import paths_where
from pipeline.storage.columns import is_first
from pipeline.storage.tables import ASKED_FOR, REJECTED, in_order

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings, FilterSettings, Recipe

_MEASURES: dict[str, pl.Expr] = {
    "width": pl.col("width").cast(pl.Int64),
    "height": pl.col("height").cast(pl.Int64),
    "pixels": pl.col("width").cast(pl.Int64) * pl.col("height"),
    "aspect_ratio": pl.col("width") / pl.col("height"),
}


def select(
    recipe: Recipe, raw: pl.DataFrame, listings: Mapping[str, pl.DataFrame], *, stage: str
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The rows of raw_images that are used, and the others as rejected rows of `stage`.

    An image has one reason, the first filter in the order of the recipe reference that it does not pass. A
    limit counts what passed the filters, and takes those whose content hashes are smallest: a choice that
    looks random, and is the same wherever and whenever it is made. With `duplicates: keep_first` copies of
    what is taken come last: most of them are thrown away for being copies.

    Args:
        recipe: Its datasets' `filters` and `limit`.
        raw: Table raw_images.
        listings: By dataset, of those with `filters.where`.
        stage: For the rejected rows.

    Raises:
        DatasetError: As `paths_where`.
    """
    if not any(_asks(each) for each in recipe.datasets):
        return in_order(raw, ["sample_id"]), pl.DataFrame(schema=REJECTED)
    kept: list[pl.DataFrame] = []
    refused: list[pl.DataFrame] = []
    for settings in recipe.datasets:
        rows = raw.filter(pl.col("dataset") == settings.name)
        why = rows.select(_first_reason(settings, listings.get(settings.name))).to_series()
        passed = rows.filter(why.is_null())
        refused.append(_refused(rows.filter(why.is_not_null()), why.drop_nulls(), settings))
        if settings.limit is not None and len(passed) > settings.limit:
            ordered = passed.sort("content_hash", "sample_id")
            if settings.duplicates == "keep_first":
                first = is_first(ordered["content_hash"])
                ordered = pl.concat([ordered.filter(first), ordered.filter(~first)])
            over = ordered[settings.limit :]
            passed = ordered[: settings.limit]
            refused.append(
                _refused(over, pl.Series([f"{ASKED_FOR}limit"] * len(over), dtype=pl.String), settings)
            )
        kept.append(passed)
    schema = pl.Schema(REJECTED)
    rejected = [part.with_columns(stage=pl.lit(stage)).select(*REJECTED).cast(schema) for part in refused]
    return in_order(pl.concat(kept), ["sample_id"]), pl.concat(rejected)


def _asks(settings: DatasetSettings) -> bool:
    """Whether anything of a dataset may be left out."""
    return settings.limit is not None or settings.filters.where is not None or bool(_limits(settings.filters))


def _first_reason(settings: DatasetSettings, listing: pl.DataFrame | None) -> pl.Expr:
    """Null, or the name of the first filter that an image does not pass."""
    why: pl.Expr = pl.lit(None, dtype=pl.String)
    if settings.filters.where is not None:
        assert listing is not None
        chosen = list(paths_where(settings, listing))
        why = pl.when(~pl.col("path").is_in(chosen)).then(pl.lit(f"{ASKED_FOR}where")).otherwise(why)
    for name, limit in reversed(_limits(settings.filters)):
        measure = _MEASURES[name[4:]]
        beyond = measure < limit if name.startswith("min_") else measure > limit
        why = pl.when(beyond).then(pl.lit(f"{ASKED_FOR}{name}")).otherwise(why)
    return why.alias("reason")


def _limits(filters: FilterSettings) -> list[tuple[str, float]]:
    names = [f"{end}_{measure}" for measure in _MEASURES for end in ("min", "max")]
    return [(name, value) for name in names if (value := getattr(filters, name)) is not None]


def _refused(rows: pl.DataFrame, reasons: pl.Series, settings: DatasetSettings) -> pl.DataFrame:
    """Rejected rows without their stage."""
    asked = [(name, f"filters.{name}", value) for name, value in _limits(settings.filters)]
    asked += [("where", "filters.where", settings.filters.where), ("limit", "limit", settings.limit)]
    said = {f"{ASKED_FOR}{name}": f"{key} is {value}" for name, key, value in asked}
    fixes = {
        f"{ASKED_FOR}{name}": f"change {key} of the dataset {settings.name}, which is {value}"
        for name, key, value in asked
    }
    size = pl.format("it has {}x{} pixels (height x width), ", "height", "width")
    return rows.with_columns(reasons.alias("reason")).with_columns(
        detail=size + pl.col("reason").replace_strict(said, return_dtype=pl.String),
        fix=pl.col("reason").replace_strict(fixes, return_dtype=pl.String),
    )
