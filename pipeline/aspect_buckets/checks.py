"""The checks of aspect_buckets: each sample assigned once, to a size that the model can divide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from pipeline.checks.findings import CheckContext, Finding, Outcome, findings
from pipeline.checks.outliers import outliers
from pipeline.checks.rejections import check_conservation, no_samples_left
from pipeline.errors import counted, verb
from pipeline.images.geometry import Size, not_multiples
from pipeline.validated_dataset.holdout import times_drawn

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

STAGE = "aspect_buckets"

_COLUMNS = (
    *("sample_id", "dataset", "height", "width", "bucket", "resized_height", "resized_width"),
    *("crop_top", "crop_left", "target_height", "target_width", "crop_loss"),
)
"""Of its table, what is looked at here."""


def run(context: CheckContext) -> list[Finding]:
    """One finding for each check of aspect_buckets, from its table and the base model's configuration.

    Raises:
        TableError: There is no table of validated_dataset or aspect_buckets.
        ModelError: The recipe's base model cannot be found, or is of no known family.
    """
    from pipeline.cache.requests import RecipeEntries

    held_out = any(dataset.validation_fraction for dataset in context.recipe.datasets)
    table = context.tables.read(STAGE, (*_COLUMNS, "duplicate_group") if held_out else _COLUMNS)
    rejected = context.tables.read_rejected(STAGE)["sample_id"]
    before = context.tables.read("validated_dataset", ["sample_id"])["sample_id"]
    multiple = RecipeEntries(context.recipe).family.size_multiple()
    outcomes = {
        "conservation": check_conservation(before, table["sample_id"], rejected, STAGE),
        "shape_uniformity": _shape_uniformity(table, multiple),
        "file_size_outliers": _file_size_outliers(table),
        "batches_possible": _batches_possible(context, table),
        "underfilled": _underfilled(context.recipe, table),
        "crop_loss": _crop_loss(context.recipe, table),
    }
    return findings(context, STAGE, outcomes)


def _shape_uniformity(table: pl.DataFrame, multiple: int) -> Outcome:
    """One size in each bucket, the size its name says, divisible; and crops inside of what is cropped."""
    sizes = table.group_by("bucket", "target_height", "target_width").len().sort("bucket")
    several = sizes.filter(pl.col("bucket").is_duplicated())["bucket"].unique().sort()
    rows = [{"bucket": name, "problem": "holds several target sizes"} for name in several]
    for name, height, width, _ in sizes.iter_rows():
        if name != str(Size(height, width)):
            rows.append({"bucket": name, "problem": f"its target size is {height}x{width}"})
        if not_multiples([Size(height, width)], multiple):
            problem = f"{height}x{width} is not divisible by the model's {multiple}"
            rows.append({"bucket": name, "problem": problem})
    inside = pl.all_horizontal(
        (pl.col("crop_top") >= 0)
        & (pl.col("crop_top") + pl.col("target_height") <= pl.col("resized_height")),
        (pl.col("crop_left") >= 0)
        & (pl.col("crop_left") + pl.col("target_width") <= pl.col("resized_width")),
    )
    outside = table.filter(~inside)["sample_id"]
    rows += [{"sample_id": sample_id, "problem": "its crop lies outside of it"} for sample_id in outside]
    numbers = {"buckets": table["bucket"].n_unique(), "multiple": multiple}
    if not rows:
        summary = f"{counted(numbers['buckets'], 'bucket')}, each of one size divisible by {multiple}"
        return Outcome(True, summary, numbers=numbers)
    first = rows[0]
    where = first.get("bucket", first.get("sample_id"))
    summary = f"{counted(len(rows), 'problem')} with sizes, the first: {where} "
    fix = f"set buckets.step to {multiple} or a multiple of it, and materialize aspect_buckets again"
    return Outcome(False, summary + first["problem"], fix, rows, numbers)


def _file_size_outliers(table: pl.DataFrame) -> Outcome:
    """Buckets with far fewer samples than the rest; one with far more is no loss."""
    counts = table.group_by("bucket").len("samples").sort("samples", "bucket")
    found = outliers(counts["samples"].to_numpy())
    few = counts.filter(pl.Series(found.mask & (counts["samples"].to_numpy() < found.low), dtype=pl.Boolean))
    numbers = {"buckets": len(counts), "median": found.median if np.isfinite(found.median) else 0.0}
    if few.is_empty():
        told = "none has far fewer samples" if found.judged else "too few to compare"
        return Outcome(True, f"{counted(len(counts), 'bucket')}, {told}", numbers=numbers)
    summary = f"{len(few)} of {counted(len(counts), 'bucket')} {verb(len(few), 'has', 'have')} "
    summary += f"far fewer samples than the median of {found.median:g}"
    fix = "add images of these shapes, raise buckets.step, or lower buckets.max_aspect_ratio"
    return Outcome(False, summary, fix, few.rows(named=True), numbers)


def _draws(recipe: Recipe, table: pl.DataFrame) -> pl.DataFrame:
    """Columns bucket and draws: how often an epoch takes a sample of the bucket, of those that have any."""
    drawn = table.select("bucket", draws=times_drawn(table, recipe.datasets))
    counts = drawn.group_by("bucket").agg(pl.col("draws").sum())
    return counts.filter(pl.col("draws") > 0).sort("draws", "bucket")


def _batches(recipe: Recipe, table: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, Any]]:
    """The buckets that fill no batch, and numbers about batches for the recipe's world size."""
    draws = _draws(recipe, table)
    capacity = recipe.training.batch_size * recipe.accelerate.num_processes
    total = int(draws["draws"].sum())
    full = int((draws["draws"] // capacity * capacity).sum())
    numbers = {
        "samples_at_once": capacity,
        "draws_per_epoch": total,
        "in_full_batches": round(full / total, 4) if total else 0.0,
        "full_batches_per_epoch": full // capacity,
    }
    return draws.filter(pl.col("draws") < capacity), numbers


def _taken(recipe: Recipe) -> str:
    training, processes = recipe.training, recipe.accelerate.num_processes
    return f"a batch of {training.batch_size} on {counted(processes, 'process', 'processes')}"


def _batches_possible(context: CheckContext, table: pl.DataFrame) -> Outcome:
    """With `drop` a bucket that fills no batch would never be trained on (FAILURES B01, B09)."""
    recipe = context.recipe
    if table.is_empty():
        stages = ("raw_images", "validated_dataset", STAGE)
        rejected = pl.concat([context.tables.read_rejected(stage) for stage in stages])
        return no_samples_left(rejected, "materialize validated_dataset and aspect_buckets again")
    few, numbers = _batches(recipe, table)
    if not numbers["draws_per_epoch"]:
        samples = counted(table["sample_id"].n_unique(), "sample is", "samples are")
        summary = f"nothing is trained on: {samples} held out for validation, and no other is left"
        fix = "lower datasets[].validation_fraction, or add images"
        return Outcome(False, summary, fix, (), numbers, final=True)
    if recipe.buckets.underfilled != "drop" or few.is_empty():
        share = numbers["in_full_batches"]
        return Outcome(True, f"{share:.1%} of an epoch in full batches", numbers=numbers)
    samples = int(few["draws"].sum())
    summary = (
        f"{counted(len(few), 'bucket')} with {counted(samples, 'sample')} {verb(len(few), 'does', 'do')} not "
        f"fill {_taken(recipe)}, and underfilled is drop: they would never be trained on"
    )
    fix = "set buckets.underfilled to partial or repeat, lower training.batch_size, or use fewer buckets"
    return Outcome(False, summary, fix, few.rows(named=True), numbers)


def _underfilled(recipe: Recipe, table: pl.DataFrame) -> Outcome:
    """Buckets whose every batch is smaller than asked, or filled with the same few images."""
    few, numbers = _batches(recipe, table)
    if few.is_empty():
        return Outcome(True, f"every bucket fills {_taken(recipe)}", numbers=numbers)
    summary = f"{len(few)} of {counted(table['bucket'].n_unique(), 'bucket')} "
    summary += f"{verb(len(few), 'does', 'do')} not fill {_taken(recipe)}"
    fix = "fit the buckets to the dataset with latentline fit-buckets, raise buckets.step, or add images"
    return Outcome(False, summary, fix, few.rows(named=True), numbers)


def _crop_loss(recipe: Recipe, table: pl.DataFrame) -> Outcome:
    limit = recipe.buckets.max_crop_loss
    found = table.filter(pl.col("crop_loss") > limit).sort("crop_loss", "sample_id", descending=[True, False])
    worst = table["crop_loss"].to_numpy().max() if len(table) else 0.0
    numbers = {"limit": limit, "worst": round(float(worst), 4)}
    if found.is_empty():
        return Outcome(True, f"no image loses more than {limit:.0%}, the worst {worst:.1%}", numbers=numbers)
    rows = [
        {
            "sample_id": row["sample_id"],
            "crop_loss": round(row["crop_loss"], 4),
            "size": str(Size(row["height"], row["width"])),
            "bucket": row["bucket"],
        }
        for row in found.iter_rows(named=True)
    ]
    summary = counted(len(found), "image loses", "images lose")
    summary += f" more than {limit:.0%} to the crop, the first: {rows[0]['sample_id']} "
    summary += f"({rows[0]['size']} to {rows[0]['bucket']}, {rows[0]['crop_loss']:.0%})"
    fix = "raise buckets.max_aspect_ratio, add sizes of these shapes, or crop the images yourself"
    return Outcome(False, summary, fix, rows, numbers)
