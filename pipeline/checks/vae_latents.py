"""The checks of vae_latents: every latent there, of the geometry's shape, of exact size, and finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from pipeline.checks.base import CheckContext, Finding, Outcome, findings
from pipeline.checks.cache_entries import REPAIR, Problems, Wanted
from pipeline.entries import Entries, recorded_stat
from pipeline.geometry import Size, placement_of

STAGE = "vae_latents"

_SHOWN = ("sample_id", "reason", "detail", "fix")


def run(context: CheckContext) -> list[Finding]:
    """One finding for each check of vae_latents, from the tables, the store and the base model's files.

    Raises:
        TableError: There is no table of aspect_buckets or vae_latents.
        ModelError: The recipe's base model cannot be found, or is of no known family.
        StoreError: An entry may not be read.
    """
    table, buckets = context.tables.read(STAGE), context.tables.read("aspect_buckets")
    rejected = context.tables.read_rejected(STAGE)
    entries = Entries(context.recipe)
    rows = table.to_dicts()
    expected = {row["sample_id"]: entries.latent(row).key for row in buckets.to_dicts()}
    problems = Problems(entries.store, _wanted(entries, rows))
    count = f"{problems.num_entries:,} entries"
    outcomes = {
        "completeness": problems.outcome(
            "completeness",
            f"each of {len(buckets):,} samples has its entry or was rejected",
            more=list(_out_of_step(rows, expected, set(rejected["sample_id"]))),
        ),
        "shape_uniformity": problems.outcome(
            "shape_uniformity",
            f"{count} of the geometry's shapes, one in each bucket",
            more=[*_other_shapes(context, entries, rows), *_mixed_buckets(table)],
        ),
        "file_size_outliers": problems.outcome("file_size_outliers", f"{count} of exactly the right bytes"),
        "finite_values": problems.outcome("finite_values", f"{count} with sound content"),
        "rejected_fraction": _rejected_fraction(context, len(table)),
    }
    return findings(context, STAGE, outcomes)


def _wanted(entries: Entries, rows: list[dict[str, Any]]) -> Iterator[Wanted]:
    """Each distinct entry of the table, as the geometry in its row and the recipe say it must be."""
    seen: set[str] = set()
    for row in rows:
        spec = entries.latent(row)
        if spec.key == row["key"] and spec.key not in seen:
            seen.add(spec.key)
            yield Wanted(row["sample_id"], spec, recorded_stat(row))


def _out_of_step(
    rows: list[dict[str, Any]], expected: Mapping[str, str], rejected: set[str]
) -> Iterator[dict[str, Any]]:
    """Samples that the table lacks, has too many, or has the entry of something else for."""
    keys = {row["sample_id"]: row["key"] for row in rows}
    for sample_id in sorted(expected.keys() | keys.keys()):
        if sample_id not in keys:
            if sample_id not in rejected:
                yield {"sample_id": sample_id, "problem": "it is in aspect_buckets and not here"}
        elif sample_id not in expected:
            yield {"sample_id": sample_id, "problem": "it is not in aspect_buckets"}
        elif keys[sample_id] != expected[sample_id]:
            problem = "its entry was made for another content, geometry, model or setting"
            yield {"sample_id": sample_id, "problem": problem}


def _other_shapes(
    context: CheckContext, entries: Entries, rows: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Rows whose latent is not of the shape that the geometry, asked anew, gives for the original size."""
    if not rows:
        return
    names = [row["sample_id"] for row in rows]
    placement = placement_of(context.recipe.buckets)
    placed = placement.assign_many([row["height"] for row in rows], [row["width"] for row in rows], names)
    anew = placed.columns
    heights, widths = anew.target_height.tolist(), anew.target_width.tolist()
    for row, height, width in zip(rows, heights, widths, strict=True):
        shape = entries.family.latent_shape(Size(height, width))
        recorded = (row["latent_channels"], row["latent_height"], row["latent_width"])
        if recorded != shape:
            problem = f"its latent is {recorded}, the geometry asks for {shape}"
            yield {"sample_id": row["sample_id"], "problem": problem}


def _mixed_buckets(table: pl.DataFrame) -> Iterator[dict[str, Any]]:
    """Buckets whose latents have several shapes."""
    shape = ("latent_channels", "latent_height", "latent_width")
    kinds = table.group_by("bucket").agg(pl.struct(shape).n_unique().alias("shapes"))
    for bucket, shapes in kinds.filter(pl.col("shapes") > 1).sort("bucket").iter_rows():
        yield {"sample_id": f"bucket {bucket}", "problem": f"it holds latents of {shapes} shapes"}


def _rejected_fraction(context: CheckContext, kept: int) -> Outcome:
    """Of all images that were found, the share that the stages up to here rejected."""
    stages = ("raw_images", "validated_dataset", STAGE)  # aspect_buckets rejects only what it was asked to
    everything = pl.concat([context.tables.read_rejected(stage) for stage in stages])
    here = everything.filter(pl.col("stage") == STAGE)
    total, limit = kept + len(everything), context.recipe.checks.max_rejected_fraction
    fraction = len(everything) / total if total else 0.0
    numbers = {"rejected": len(everything), "rejected_here": len(here), "of": total, "limit": limit}
    numbers |= {"fraction": round(fraction, 6)}
    summary = f"{len(everything):,} of {total:,} images are rejected, {len(here):,} of them here "
    summary += f"({fraction:.1%}, the limit is {limit:.1%})"
    rows = everything.select(_SHOWN).rows(named=True)
    if not kept:
        fix = "see tables/rejected.parquet: each row has its fix" if total else REPAIR
        return Outcome(False, f"no sample is left; {summary}", fix, rows, numbers)
    if fraction <= limit:
        return Outcome(True, summary, numbers=numbers)
    fix = "repair or remove what tables/rejected.parquet lists, or raise checks.max_rejected_fraction"
    return Outcome(False, summary, fix, rows, numbers)
