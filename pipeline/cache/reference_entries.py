"""Cache entries of reference images: their geometry, keys and shapes, for rows of latents with references.

A reference is a latent of its own size with the mean of the VAE's posterior, as the pipelines encode it.
Where a latent is mirrored, its references are mirrored too.
"""

from __future__ import annotations

from copy import copy
from math import isqrt
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.recipe_entries import TARGET, RecipeEntries
from pipeline.errors import BucketError
from pipeline.images.geometry import Crop, Geometry, Size
from pipeline.models.reference_support import require_references

if TYPE_CHECKING:
    from pipeline.models.families import Family
    from pipeline.recipe import Recipe

IMAGES, KEYS, STATS_TEXT = "reference_images", "reference_keys", "reference_stats"
"""Columns of the tables, see `REFERENCE_COLUMNS`."""

_IMAGE = pl.Struct({"path": pl.String, "hash": pl.String, "height": pl.Int32, "width": pl.Int32})

_GEOMETRY: dict[str, Any] = dict.fromkeys(
    ("height", "width", "resized_height", "resized_width", "crop_top", "crop_left", *TARGET), pl.Int32
)


def reference_hashes() -> pl.Expr:
    """Return the content hashes of a sample's references, separated by spaces; null without references."""
    images = pl.col(IMAGES).str.json_decode(pl.List(_IMAGE))
    return images.list.eval(pl.element().struct.field("hash")).list.join(" ")


def has_references(recipe: Recipe, rows: pl.DataFrame) -> pl.Series:
    """Return whether each row has references, and its dataset still uses references."""
    if IMAGES not in rows.columns:
        return pl.Series([False], dtype=pl.Boolean).new_from_index(0, len(rows))
    datasets = [dataset.name for dataset in recipe.datasets if dataset.references]
    return rows[IMAGES].is_not_null() & rows["dataset"].is_in(datasets)


def of_references(entries: RecipeEntries) -> RecipeEntries:
    """Return the same entries with the mean of the posterior: pipelines do not sample that of a reference."""
    latents = entries.recipe.latents.model_copy(update={"posterior": "mean"})
    of_mean = copy(entries)
    of_mean.recipe = entries.recipe.model_copy(update={"latents": latents})
    return of_mean


def reference_geometry(family: Family, original_size: Size, resolution: int | None = None) -> Geometry:
    """Return the geometry of a reference.

    Args:
        family: Family of the base model, which sees references.
        original_size: Size after EXIF orientation.
        resolution: `resolution` of the recipe; None for the size that the family's pipeline uses.

    Raises:
        BucketError: The family's pipeline refuses a reference of this size.
    """
    spec = family.spec.references
    assert spec is not None, f"{family.name} sees no references"
    of_pipeline = spec.geometry(family.model, original_size)
    if resolution is None:
        return of_pipeline

    multiple = family.size_multiple()
    scaled = Size(*(max(multiple, edge) for edge in size_within(original_size, resolution)))
    target = Size(*(edge // multiple * multiple for edge in scaled))
    if not spec.crops:
        return Geometry(original_size, target, Crop(0, 0, *target))
    top, left = (scaled.height - target.height) // 2, (scaled.width - target.width) // 2
    return Geometry(original_size, scaled, Crop(top, left, *target))


def size_within(size: Size, resolution: int) -> Size:
    """Return `size`, scaled down to at most resolution squared pixels; edges are rounded down."""
    budget, area = resolution * resolution, size.height * size.width
    return size if area <= budget else Size(*(isqrt(edge * edge * budget // area) for edge in size))


def refused_references(entries: RecipeEntries, rows: pl.DataFrame) -> dict[str, BucketError]:
    """Return why the family's pipeline refuses a reference, by the sample_id of each row with such a one.

    Raises:
        RecipeError: The base model does not see the recipe's references.
    """
    each = _explode(entries, rows)
    refused: dict[str, BucketError] = {}
    for (height, width), of_size in each.group_by("height", "width", maintain_order=True):
        try:
            reference_geometry(entries.family, Size(height, width))
        except BucketError as err:
            for sample_id, number, path in of_size.select("sample_id", "number", "path").iter_rows():
                what = f"references[{number}], {path}: {err.what}"
                refused.setdefault(sample_id, BucketError(what, where=err.where, fix=err.fix))
    return refused


def reference_rows(entries: RecipeEntries, rows: pl.DataFrame) -> pl.DataFrame:
    """Return one row per reference of each row of vae_latents, sorted by row and number.

    Args:
        entries: Entries of the recipe.
        rows: Rows of vae_latents, which may lack entries.

    Returns:
        `row` (index into `rows`), `number` (from 0), `sample_id`, `dataset`, `bucket`, `flipped`, `path`
        (relative to the reference's folder), `content_hash`, the geometry as in vae_latents, and `key`.

    Raises:
        RecipeError: The base model does not see the recipe's references.
        BucketError: As `reference_geometry`.
    """
    each = _explode(entries, rows)
    sizes = each.select("resolution", "height", "width").unique(maintain_order=True)
    geometry = pl.DataFrame(
        [_geometry_row(entries.family, **size) for size in sizes.iter_rows(named=True)],
        schema={"resolution": pl.Int32, **_GEOMETRY},
    )
    each = each.join(
        geometry, on=["resolution", "height", "width"], how="left", nulls_equal=True, maintain_order="left"
    )
    return each.with_columns(of_references(entries).latent_keys(each).alias("key"))


def reference_keys(entries: RecipeEntries, rows: pl.DataFrame) -> pl.Series:
    """Return the keys of the references of each row of vae_latents in order, separated by spaces."""
    each = reference_rows(entries, rows)
    by_row = each.group_by("row", maintain_order=True).agg(keys=pl.col("key").str.join(" "))
    indexed = rows.select(pl.int_range(pl.len(), dtype=pl.UInt32).alias("row"))
    return indexed.join(by_row, on="row", how="left", maintain_order="left")["keys"].alias(KEYS)


def _explode(entries: RecipeEntries, rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of `reference_rows` without geometry and key, with the recipe's `resolution`."""
    recipe = entries.recipe
    if any(dataset.references for dataset in recipe.datasets):
        require_references(recipe, entries.family)
    indexed = rows.with_row_index("row").filter(has_references(recipe, rows))
    if IMAGES not in indexed.columns:
        indexed = indexed.with_columns(pl.lit(None, pl.String).alias(IMAGES))
    images = indexed.select(
        *("row", "sample_id", "dataset", "bucket", "flipped"),
        image=pl.col(IMAGES).str.json_decode(pl.List(_IMAGE)),
    )
    numbers = pl.int_ranges(0, pl.col("image").list.len(), dtype=pl.Int32)
    each = images.with_columns(number=numbers).explode("image", "number").unnest("image")
    each = each.rename({"hash": "content_hash"})
    return each.with_columns(_resolutions(recipe, each))


def _resolutions(recipe: Recipe, rows: pl.DataFrame) -> pl.Series:
    """Return the recipe's `resolution` of each reference; null for the size of the pipeline."""
    settings = {dataset.name: dataset.references for dataset in recipe.datasets}
    values = [
        settings[dataset][number].resolution if number < len(settings[dataset]) else None
        for dataset, number in rows.select("dataset", "number").iter_rows()
    ]
    return pl.Series("resolution", values, dtype=pl.Int32)


def _geometry_row(family: Family, *, resolution: int | None, height: int, width: int) -> dict[str, Any]:
    geometry = reference_geometry(family, Size(height, width), resolution)
    values = (*geometry.original_size, *geometry.resized_size, *geometry.crop)
    return {"resolution": resolution, **dict(zip(_GEOMETRY, values, strict=True))}
