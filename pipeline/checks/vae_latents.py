"""The checks of vae_latents: every latent there, of the geometry's shape, of exact size, and finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from pipeline.checks.base import CheckContext, Finding, Outcome, findings
from pipeline.checks.cache_entries import REPAIR, Problems
from pipeline.checks.reasons import fixes, most_frequent_first
from pipeline.counting import counted, verb
from pipeline.entries import LATENT_SHAPE, TARGET, Entries
from pipeline.geometry import placement_of
from pipeline.tables import not_asked_for

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
    asked = table.with_columns(asked=pl.Series(entries.latent_keys(table), dtype=pl.String))
    own = asked.filter(pl.col("key") == pl.col("asked")).unique("key", keep="first", maintain_order=True)
    sized = own.join(
        entries.latent_shapes(own).select(*TARGET, "num_bytes"), on=TARGET, maintain_order="left"
    )
    problems = Problems(entries.store, "latents", sized, entries.latent)
    count = counted(problems.num_entries, "entry", "entries")
    outcomes = {
        "completeness": problems.outcome(
            "completeness",
            f"each of {counted(buckets['sample_id'].n_unique(), 'sample')} has its entry or was rejected",
            more=list(_out_of_step(table, entries.latent_rows(buckets), rejected)),
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


def _out_of_step(
    table: pl.DataFrame, expected: pl.DataFrame, rejected: pl.DataFrame
) -> Iterator[dict[str, Any]]:
    """Samples that the table lacks, has too many, or has the entry of something else for."""
    names = ["sample_id", "bucket", "flipped"]
    wanted = expected.select(*names, wanted="key").join(
        rejected.select("sample_id"), on="sample_id", how="anti"
    )
    both = table.select(*names, "key").join(wanted, on=names, how="full", coalesce=True)
    wrong = both.filter(~pl.col("key").eq_missing(pl.col("wanted"))).sort(names)
    here = set(table["sample_id"])
    for sample_id, bucket, flipped, key, asked in wrong.select(*names, "key", "wanted").iter_rows():
        if key is None:
            what = f"its latent of {bucket}" if sample_id in here else "it"
            what = "its mirrored latent" if flipped and sample_id in here else what
            problem = f"{what} is in aspect_buckets and not here"
        elif asked is None:
            problem = f"it is not in aspect_buckets as {bucket}"
            problem = "its mirrored latent is not asked for" if flipped else problem
        else:
            problem = "its entry was made for another content, geometry, model or setting"
        yield {"sample_id": sample_id, "problem": problem}


def _other_shapes(context: CheckContext, entries: Entries, table: pl.DataFrame) -> Iterator[dict[str, Any]]:
    """Rows whose latent is of no shape that the geometry, asked anew, gives for the original size."""
    if table.is_empty():
        return
    placement = placement_of(context.recipe.buckets)
    names = table["sample_id"] if placement.crop == "random" else None
    anew = placement.assign_many(table["height"].to_numpy(), table["width"].to_numpy(), names)
    columns = anew.columns
    sizes = pl.DataFrame({"target_height": columns.target_height, "target_width": columns.target_width})
    asked = sizes.cast(pl.Int32).join(entries.latent_shapes(sizes), on=TARGET, maintain_order="left")
    both = (
        table[anew.image]
        .select("sample_id", *LATENT_SHAPE)
        .hstack(asked.select(pl.col(LATENT_SHAPE).name.prefix("asked_")))
    )
    same = pl.all_horizontal(pl.col(name) == pl.col(f"asked_{name}") for name in LATENT_SHAPE)
    found = both.with_columns(row=pl.Series(anew.image), same=same)
    wrong = found.filter(~pl.col("same").any().over("row")).unique("row", keep="last", maintain_order=True)
    for sample_id, *shapes in wrong.drop("row", "same").iter_rows():
        problem = f"its latent is {tuple(shapes[:3])}, the geometry asks for {tuple(shapes[3:])}"
        yield {"sample_id": sample_id, "problem": problem}


def _mixed_buckets(table: pl.DataFrame) -> Iterator[dict[str, Any]]:
    """Buckets whose latents have several shapes."""
    shape = ("latent_channels", "latent_height", "latent_width")
    kinds = table.group_by("bucket").agg(pl.struct(shape).n_unique().alias("shapes"))
    for bucket, shapes in kinds.filter(pl.col("shapes") > 1).sort("bucket").iter_rows():
        yield {"sample_id": f"bucket {bucket}", "problem": f"it holds latents of {shapes} shapes"}


def _rejected_fraction(context: CheckContext, kept: int) -> Outcome:
    """Of all images that were found, the share that the stages up to here rejected."""
    stages = ("raw_images", "validated_dataset", STAGE)  # aspect_buckets rejects only what it was asked to
    everything = pl.concat([context.tables.read_rejected(stage) for stage in stages]).filter(not_asked_for())
    here = everything.filter(pl.col("stage") == STAGE)
    total, limit = kept + len(everything), context.recipe.checks.max_rejected_fraction
    fraction = len(everything) / total if total else 0.0
    numbers = {"rejected": len(everything), "rejected_here": len(here), "of": total, "limit": limit}
    numbers |= {"fraction": round(fraction, 6)}
    summary = (
        f"{len(everything):,} of {counted(total, 'image')} {verb(len(everything), 'is', 'are')} rejected, "
        f"{len(here):,} of them here ({fraction:.1%}, the limit is {limit:.1%})"
    )
    rows = most_frequent_first(everything).select(_SHOWN).rows(named=True)
    if not kept:
        fix = fixes(everything) if total else REPAIR
        return Outcome(False, f"no sample is left; {summary}", fix, rows, numbers)
    if fraction <= limit:
        return Outcome(True, summary, numbers=numbers)
    fix = fixes(everything, otherwise="or raise checks.max_rejected_fraction")
    return Outcome(False, summary, fix, rows, numbers)
