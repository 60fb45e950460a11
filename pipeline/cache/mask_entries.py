"""Cache entries of masks: their keys and shapes, for the rows of latents that have a mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.entry_format import MASK
from pipeline.cache.keys import KeyTemplate, MaskInputs, mask_key
from pipeline.cache.recipe_entries import TARGET, RecipeEntries
from pipeline.cache.store import EntrySpec, TensorSpec
from pipeline.images.geometry import Geometry, Size
from pipeline.versions import PREPROCESSING_VERSION

if TYPE_CHECKING:
    from pipeline.images.mask import MaskSource
    from pipeline.recipe import Recipe

MASK_DTYPE = "float16"
"""Dtype of stored weights; half a level of a mask is four times its precision."""


def mask_sources(recipe: Recipe) -> dict[str, MaskSource]:
    """Return the origin of the masks of each dataset that has masks, by the dataset's name."""
    return {
        dataset.name: "file" if dataset.mask.from_ is None else dataset.mask.from_
        for dataset in recipe.datasets
        if dataset.mask is not None
    }


def mask_inputs(entries: RecipeEntries, row: Mapping[str, Any]) -> MaskInputs:
    """Return everything that decides the mask entry of a row of vae_latents with a mask."""
    geometry = Geometry.from_row(row)
    _, latent_height, _ = entries.family.latent_shape(geometry.target_size)
    return MaskInputs(
        mask_hash=row["mask_hash"],
        source=mask_sources(entries.recipe)[row["dataset"]],
        resized_size=geometry.resized_size,
        crop=geometry.crop,
        flip=bool(row.get("flipped", False)),
        factor=geometry.target_size.height // latent_height,
        preprocessing_version=PREPROCESSING_VERSION,
        dtype=MASK_DTYPE,
    )


def mask_spec(entries: RecipeEntries, row: Mapping[str, Any]) -> EntrySpec:
    """Return the mask entry of a row of vae_latents with a mask."""
    target_size = Size(*(row[name] for name in TARGET))
    return EntrySpec("masks", mask_key(mask_inputs(entries, row)), mask_tensors(entries, target_size))


def mask_tensors(entries: RecipeEntries, target_size: Size) -> dict[str, TensorSpec]:
    """Return the tensor of a mask's entry: `MASK` (1, h, w)."""
    _, *size = entries.family.latent_shape(target_size)
    return {MASK: TensorSpec(MASK_DTYPE, (1, *size))}


def has_mask(recipe: Recipe, rows: pl.DataFrame) -> pl.Series:
    """Return whether each row of vae_latents has a mask, and its dataset still uses masks."""
    if "mask_hash" not in rows.columns:
        return pl.Series([False], dtype=pl.Boolean).new_from_index(0, len(rows))
    return rows["mask_hash"].is_not_null() & rows["dataset"].is_in(list(mask_sources(recipe)))


def mask_keys(entries: RecipeEntries, rows: pl.DataFrame) -> pl.Series:
    """Return the keys of `mask_spec` for all rows; null for rows without a mask.

    `rows` has `dataset` and the columns of vae_latents that decide a key.
    """
    masked = has_mask(entries.recipe, rows)
    used = rows.filter(masked)
    if used.is_empty():
        return pl.Series([None], dtype=pl.String).new_from_index(0, len(rows))

    # All inputs of the first row are common to all rows, except those in these columns.
    inputs = vars(mask_inputs(entries, used.row(0, named=True)))
    placeholders: dict[str, Any] = {
        "mask_hash": "@mask_hash@",
        "source": "@source@",
        "flip": "@flipped@",
        "resized_size": ["@resized_height@", "@resized_width@"],
        "crop": [f"@{name}@" for name in ("crop_top", "crop_left", *TARGET)],
    }
    template = KeyTemplate({"masks": inputs | placeholders})
    sources = pl.col("dataset").replace_strict(mask_sources(entries.recipe), return_dtype=pl.String)
    in_json = {name: pl.col(name).cast(pl.String) for name in template.names}
    in_json |= {name: pl.format('"{}"', name) for name in ("mask_hash", "source")}
    keys = template.hashes(used.with_columns(source=sources), in_json)
    return pl.Series([None], dtype=pl.String).new_from_index(0, len(rows)).scatter(masked.arg_true(), keys)
