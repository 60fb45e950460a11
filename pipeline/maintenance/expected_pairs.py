"""The work that the next cache job would do on masks and reference images."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.cache.mask_entries import mask_keys, mask_sources, mask_spec
from pipeline.cache.recipe_entries import STATS, TARGET, RecipeEntries
from pipeline.cache.reference_entries import IMAGES, KEYS, of_references, reference_rows
from pipeline.maintenance.expected import (
    DAMAGED,
    GEOMETRY,
    MISSING,
    Expected,
    Row,
    changed_inputs,
    estimate_seconds,
    unusable_entries,
)
from pipeline.vae_latents.references import recorded_references

if TYPE_CHECKING:
    from pipeline.cache.store import EntrySpec

NEW_MASK, MASK_CHANGED = "new mask", "mask changed"
NEW_REFERENCE, REFERENCE_CHANGED = "new reference", "reference changed"

_ROW = ("sample_id", "bucket", "flipped")


def expect_masks(
    entries: RecipeEntries, requests: pl.DataFrame, known: pl.DataFrame | None
) -> Expected | None:
    """Return the work on masks, as `_expect_latents` for latents; None for a recipe without masks."""
    if not mask_sources(entries.recipe):
        return None
    requests = requests.with_columns(mask_keys(entries, requests).alias("key")).drop_nulls("key")
    earlier_rows: dict[tuple[Any, ...], Row] = {}
    recorded = None
    if known is not None and "mask_key" in known.columns:
        earlier_rows = {(row["sample_id"], row["bucket"], row["flipped"]): row for row in known.to_dicts()}
        recorded = known.select(key="mask_key", **{name: f"mask_{name}" for name in STATS}).drop_nulls()

    expected = Expected("masks")
    num_bytes = [mask_spec(entries, row).file_bytes for row in requests.iter_rows(named=True)]
    requests = requests.with_columns(pl.Series("num_bytes", num_bytes, dtype=pl.Int64))
    requests = requests.unique("key", keep="first", maintain_order=True)
    for row, spec, status in unusable_entries(
        entries, expected, requests, recorded, spec_of=lambda row: mask_spec(entries, row)
    ):
        earlier = earlier_rows.get((row["sample_id"], row["bucket"], row["flipped"]))
        reason = DAMAGED if status == "wrong" else _mask_reason(row, earlier)
        expected.add(reason, row["sample_id"], spec.file_bytes)
    estimate_seconds(entries, expected, cost=expected.to_make)
    return expected


def _mask_reason(row: Row, earlier: Row | None) -> str:
    if earlier is None or earlier["mask_hash"] is None:
        return NEW_MASK
    if earlier["mask_hash"] != row["mask_hash"]:
        return MASK_CHANGED
    return MISSING if earlier["mask_key"] == row["key"] else GEOMETRY


def expect_references(
    entries: RecipeEntries, requests: pl.DataFrame, known: pl.DataFrame | None
) -> Expected | None:
    """Return the work on references, as `expect_masks` for masks; None for a recipe without references.

    An entry that is also a latent of a sample is not counted again.
    """
    if not any(dataset.references for dataset in entries.recipe.datasets):
        return None
    earlier: dict[tuple[Any, ...], tuple[Row, str]] = {}
    if known is not None and KEYS in known.columns:
        for row in known.drop_nulls(KEYS).iter_rows(named=True):
            of_row = zip(json.loads(row[IMAGES]), row[KEYS].split(), strict=True)
            earlier |= {(*(row[name] for name in _ROW), n): each for n, each in enumerate(of_row)}

    of_mean = of_references(entries)
    rows = reference_rows(entries, requests).join(requests, on="key", how="anti", maintain_order="left")
    rows = rows.unique("key", keep="first", maintain_order=True)
    sizes = of_mean.latent_shapes(rows).select(*TARGET, "num_bytes")
    rows = rows.join(sizes, on=TARGET, how="left", maintain_order="left")

    expected, num_pixels = Expected("latents"), 0
    for row, spec, status in unusable_entries(
        entries, expected, rows, recorded_references(known), spec_of=of_mean.latent_spec
    ):
        before = earlier.get((*(row[name] for name in _ROW), row["number"]))
        reason = DAMAGED if status == "wrong" else _reference_reason(of_mean, row, spec, before)
        expected.add(reason, f"{row['sample_id']}, reference {row['number']}", spec.file_bytes)
        num_pixels += row["target_height"] * row["target_width"]
    estimate_seconds(entries, expected, cost=num_pixels)
    return expected


def _reference_reason(
    entries: RecipeEntries, row: Row, spec: EntrySpec, earlier: tuple[Row, str] | None
) -> str:
    if earlier is None:
        return NEW_REFERENCE
    image, key = earlier
    if image["hash"] != row["content_hash"]:
        return REFERENCE_CHANGED
    if key == spec.key:
        return MISSING
    return changed_inputs(entries, spec, key, vars(entries.latent_inputs(row)))
