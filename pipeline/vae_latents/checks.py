"""The checks of vae_latents: every latent there, of the geometry's shape, of exact size, and finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from pipeline.cache.requests import LATENT_SHAPE, STAT_COLUMNS, TARGET, RecipeEntries
from pipeline.checks.findings import CheckContext, Finding, Outcome, findings
from pipeline.checks.rejections import (
    REJECTED_COLUMNS,
    most_frequent_first,
    most_frequent_fixes,
    no_samples_left,
)
from pipeline.encoding.checks import AT_ONCE, REPAIR, Problems
from pipeline.errors import counted, verb
from pipeline.images.geometry import Placement, placement_of
from pipeline.storage.tables import in_order, not_asked_for, only

STAGE = "vae_latents"

_NAMES = ("sample_id", "bucket", "flipped")

_GEOMETRY = (
    *("height", "width", "resized_height", "resized_width"),
    *("crop_top", "crop_left", "target_height", "target_width"),
)

_ASKED_FOR = ("sample_id", "bucket", "content_hash", *_GEOMETRY)
"""Of aspect_buckets: what names a latent, and what decides its key."""

_COLUMNS = (*_ASKED_FOR, "flipped", *LATENT_SHAPE, "key", *STAT_COLUMNS)
"""Of vae_latents."""


def run(context: CheckContext) -> list[Finding]:
    """One finding for each check of vae_latents, from the tables, the store and the base model's files.

    Raises:
        TableError: There is no table of aspect_buckets or vae_latents.
        ModelError: The recipe's base model cannot be found, or is of no known family.
        StoreError: An entry may not be read.
    """
    table = context.tables.read(STAGE, _COLUMNS)
    entries = RecipeEntries(context.recipe)
    asked = entries.latent_keys(table)
    own = only(table, table["key"] == asked)
    own = only(own, own["key"].is_first_distinct())
    sizes = entries.latent_shapes(own).select(*TARGET, "num_bytes")
    num_bytes = own.select(TARGET).join(sizes, on=TARGET, how="left", maintain_order="left")["num_bytes"]
    problems = Problems(entries.store, "latents", own.with_columns(num_bytes), entries.latent_spec)
    del own
    count = counted(problems.num_entries, "entry", "entries")
    buckets = context.tables.read("aspect_buckets", _ASKED_FOR)
    rejected = context.tables.read_rejected(STAGE)
    outcomes = {
        "completeness": problems.outcome(
            "completeness",
            f"each of {counted(buckets['sample_id'].n_unique(), 'sample')} has its entry or was rejected",
            more=list(_out_of_step(entries, table, asked, _expected(entries, buckets, rejected))),
        ),
        "shape_uniformity": problems.outcome(
            "shape_uniformity",
            f"{count} of the geometry's shapes, one in each bucket",
            more=[*_other_shapes(context, entries, table), *_mixed_buckets(table)],
        ),
        "file_size_outliers": problems.outcome("file_size_outliers", f"{count} of exactly the right bytes"),
        "finite_values": problems.outcome("finite_values", f"{count} with sound content"),
        "rejected_fraction": _rejected_fraction(context, table["sample_id"].n_unique()),
    }
    return findings(context, STAGE, outcomes)


def _expected(entries: RecipeEntries, buckets: pl.DataFrame, rejected: pl.DataFrame) -> pl.DataFrame:
    """The rows of aspect_buckets as those of vae_latents should be, but for what that rejected."""
    flips = (False, True) if entries.recipe.latents.flip else (False,)
    left = buckets.join(rejected, on="sample_id", how="anti") if len(rejected) else buckets
    rows = pl.concat([left.with_columns(flipped=pl.lit(flip)) for flip in flips])
    return in_order(rows, list(_NAMES))


def _out_of_step(
    entries: RecipeEntries, table: pl.DataFrame, asked: pl.Series, expected: pl.DataFrame
) -> Iterator[dict[str, Any]]:
    """Samples that the table lacks, has too many, or has the entry of something else for."""
    if table.select(expected.columns).equals(expected) and table["key"].equals(asked):
        return
    wanted = expected.select(*_NAMES, wanted=entries.latent_keys(expected))
    both = table.select(*_NAMES, "key").join(wanted, on=_NAMES, how="full", coalesce=True)
    wrong = both.filter(~pl.col("key").eq_missing(pl.col("wanted"))).sort(_NAMES)
    here = set(table["sample_id"])
    for sample_id, bucket, flipped, key, other in wrong.select(*_NAMES, "key", "wanted").iter_rows():
        if key is None:
            what = f"its latent of {bucket}" if sample_id in here else "it"
            what = "its mirrored latent" if flipped and sample_id in here else what
            problem = f"{what} is in aspect_buckets and not here"
        elif other is None:
            problem = f"it is not in aspect_buckets as {bucket}"
            problem = "its mirrored latent is not asked for" if flipped else problem
        else:
            problem = "its entry was made for another content, geometry, model or setting"
        yield {"sample_id": sample_id, "problem": problem}


def _other_shapes(
    context: CheckContext, entries: RecipeEntries, table: pl.DataFrame
) -> Iterator[dict[str, Any]]:
    """Rows whose latent is of no shape that the geometry, asked anew, gives for the original size."""
    placement = placement_of(context.recipe.buckets)
    for rows in table.iter_slices(AT_ONCE):
        yield from _shapes_beside(placement, entries, rows)


def _shapes_beside(
    placement: Placement, entries: RecipeEntries, rows: pl.DataFrame
) -> Iterator[dict[str, Any]]:
    names = rows["sample_id"] if placement.crop == "random" else None
    anew = placement.assign_many(rows["height"].to_numpy(), rows["width"].to_numpy(), names)
    columns = anew.columns
    sizes = pl.DataFrame({"target_height": columns.target_height, "target_width": columns.target_width})
    asked = sizes.cast(pl.Int32).join(entries.latent_shapes(sizes), on=TARGET, maintain_order="left")
    both = rows.select("sample_id", *LATENT_SHAPE)[anew.image].hstack(
        asked.select(pl.col(LATENT_SHAPE).name.prefix("asked_"))
    )
    same = pl.all_horizontal(pl.col(name) == pl.col(f"asked_{name}") for name in LATENT_SHAPE)
    found = both.with_columns(row=pl.Series(anew.image), same=same)
    wrong = found.filter(~pl.col("same").any().over("row")).unique("row", keep="last", maintain_order=True)
    for sample_id, *shapes in wrong.drop("row", "same").iter_rows():
        problem = f"its latent is {tuple(shapes[:3])}, the geometry asks for {tuple(shapes[3:])}"
        yield {"sample_id": sample_id, "problem": problem}


def _mixed_buckets(table: pl.DataFrame) -> Iterator[dict[str, Any]]:
    """Buckets whose latents have several shapes."""
    kinds = table.group_by("bucket", *LATENT_SHAPE).len().group_by("bucket").agg(shapes=pl.len())
    for bucket, shapes in kinds.filter(pl.col("shapes") > 1).sort("bucket").iter_rows():
        yield {"sample_id": f"bucket {bucket}", "problem": f"it holds latents of {shapes} shapes"}


def _rejected_fraction(context: CheckContext, kept: int) -> Outcome:
    """Of all images that were found, the share that the stages up to here rejected."""
    left_out = context.tables.read_rejected()
    if not kept:
        return no_samples_left(left_out, REPAIR)
    # aspect_buckets rejects only what it was asked to
    everything = left_out.filter(not_asked_for() & (pl.col("stage") != "aspect_buckets"))
    here = everything.filter(pl.col("stage") == STAGE)
    total, limit = kept + len(everything), context.recipe.checks.max_rejected_fraction
    fraction = len(everything) / total if total else 0.0
    numbers = {"rejected": len(everything), "rejected_here": len(here), "of": total, "limit": limit}
    numbers |= {"fraction": round(fraction, 6)}
    summary = (
        f"{len(everything):,} of {counted(total, 'image')} {verb(len(everything), 'is', 'are')} rejected, "
        f"{len(here):,} of them here ({fraction:.1%}, the limit is {limit:.1%})"
    )
    rows = most_frequent_first(everything).select(REJECTED_COLUMNS).rows(named=True)
    if fraction <= limit:
        return Outcome(True, summary, numbers=numbers)
    fix = most_frequent_fixes(everything, otherwise="or raise checks.max_rejected_fraction")
    return Outcome(False, summary, fix, rows, numbers)
