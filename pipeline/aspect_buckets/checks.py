"""Checks of aspect_buckets: conservation, valid sizes, possible batches, crop loss.

A new check is a function here, an item of `outcomes` in `run`, its columns in `_COLUMNS`, and a declaration
under the same name in `pipeline/recipe/check_specs.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from pipeline.aspect_buckets.slider_pairs import slider_scales, with_pairs
from pipeline.errors import counted, verb
from pipeline.images.geometry import Size, not_multiples
from pipeline.reporting.findings import CheckContext, Finding, Outcome, findings
from pipeline.reporting.outliers import outliers
from pipeline.reporting.rejections import check_conservation, no_samples_left
from pipeline.validated_dataset.holdout import times_drawn

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

STAGE = "aspect_buckets"

_COLUMNS = (
    *("sample_id", "dataset", "height", "width", "bucket", "resized_height", "resized_width"),
    *("crop_top", "crop_left", "target_height", "target_width", "crop_loss"),
)
"""Columns of the table that the checks read."""


def run(context: CheckContext) -> list[Finding]:
    """Return one finding per check of aspect_buckets, from its table and the base model's configuration."""
    from pipeline.cache.recipe_entries import RecipeEntries

    # The holdout never separates near duplicates, so the samples in it follow from their groups.
    has_holdout = any(dataset.validation_fraction for dataset in context.recipe.datasets)
    table = context.tables.read(STAGE, (*_COLUMNS, "duplicate_group") if has_holdout else _COLUMNS)
    rejected = context.tables.read_rejected(STAGE)["sample_id"]
    before = context.tables.read("validated_dataset", ["sample_id"])["sample_id"]
    multiple = RecipeEntries(context.recipe).family.size_multiple()

    outcomes = {
        "conservation": check_conservation(before, table["sample_id"], rejected, STAGE),
        "shape_uniformity": _shape_uniformity(context.recipe, table, multiple),
        "file_size_outliers": _file_size_outliers(table),
        "batches_possible": _batches_possible(context, table),
        "underfilled": _underfilled(context.recipe, table),
        "crop_loss": _crop_loss(context.recipe, table),
        "slider_pairs": _slider_pairs(context.recipe, table),
    }
    return findings(context, STAGE, outcomes)


def _shape_uniformity(recipe: Recipe, table: pl.DataFrame, multiple: int) -> Outcome:
    # A bucket's name is its size. Training stacks the latents of a bucket, so a second size would fail there.
    sizes = table.group_by("bucket", "target_height", "target_width").len().sort("bucket")
    ambiguous = sizes.filter(pl.col("bucket").is_duplicated())["bucket"].unique().sort()
    rows = [{"bucket": name, "problem": "has several target sizes"} for name in ambiguous]
    for name, height, width, _ in sizes.iter_rows():
        if name != str(Size(height, width)):
            rows.append({"bucket": name, "problem": f"has the target size {height}x{width} (height x width)"})
        if not_multiples([Size(height, width)], multiple):
            problem = f"has edges that are not multiples of {multiple}, which this base model requires"
            rows.append({"bucket": name, "problem": problem})

    crop_bottom = pl.col("crop_top") + pl.col("target_height")
    crop_right = pl.col("crop_left") + pl.col("target_width")
    is_inside = (
        (pl.col("crop_top") >= 0)
        & (pl.col("crop_left") >= 0)
        & (crop_bottom <= pl.col("resized_height"))
        & (crop_right <= pl.col("resized_width"))
    )
    outside = table.filter(~is_inside)["sample_id"]
    rows += [{"sample_id": sample_id, "problem": "has a crop outside the image"} for sample_id in outside]

    numbers = {"buckets": table["bucket"].n_unique(), "multiple": multiple}
    if not rows:
        summary = (
            f"{counted(numbers['buckets'], 'bucket')}, each of one size that is a multiple of {multiple}"
        )
        return Outcome(True, summary, numbers=numbers)
    first = rows[0]
    name = first.get("bucket", first.get("sample_id"))
    summary = f"{counted(len(rows), 'problem')} with bucket sizes, the first: {name} {first['problem']}"
    # Even with explicit sizes, the own buckets of small images have edges that are multiples of step.
    keys = "buckets.step and the edges in buckets.sizes" if recipe.buckets.sizes else "buckets.step"
    fix = f"set {keys} to multiples of {multiple}, and start the job again"
    return Outcome(False, summary, fix, rows, numbers)


def _file_size_outliers(table: pl.DataFrame) -> Outcome:
    counts = table.group_by("bucket").len("samples").sort("samples", "bucket")
    result = outliers(counts["samples"].to_numpy())

    # A bucket with far more samples is not a problem. Without outliers, `low` is below every count.
    few = counts.filter(pl.Series(result.mask, dtype=pl.Boolean) & (counts["samples"] < result.low))

    numbers = {"buckets": len(counts), "median": result.median if np.isfinite(result.median) else 0.0}
    if few.is_empty():
        reason = "none has far fewer samples" if result.judged else "too few to compare"
        return Outcome(True, f"{counted(len(counts), 'bucket')}, {reason}", numbers=numbers)
    summary = f"{len(few)} of {counted(len(counts), 'bucket')} {verb(len(few), 'has', 'have')} "
    summary += f"far fewer samples than the median of {result.median:g}"
    fix = "add images of these shapes, raise buckets.step, or lower buckets.max_aspect_ratio"
    return Outcome(False, summary, fix, few.rows(named=True), numbers)


def _batches(recipe: Recipe, table: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Return the buckets that do not fill a batch of all processes, and figures about batches."""
    # Held-out samples are drawn 0 times: a bucket of them alone is not trained and needs no batch.
    draws = table.select("bucket", draws=times_drawn(table, recipe.datasets)).group_by("bucket").sum()
    draws = draws.filter(pl.col("draws") > 0).sort("draws", "bucket")

    # All processes of a step draw from one bucket, so together they need this many samples.
    capacity = recipe.training.batch_size * recipe.accelerate.num_processes
    total = int(draws["draws"].sum())
    in_full_batches = int((draws["draws"] // capacity * capacity).sum())
    numbers = {
        "samples_at_once": capacity,
        "draws_per_epoch": total,
        "in_full_batches": round(in_full_batches / total, 4) if total else 0.0,
        "full_batches_per_epoch": in_full_batches // capacity,
    }
    return draws.filter(pl.col("draws") < capacity), numbers


def _full_batch(recipe: Recipe) -> str:
    training, processes = recipe.training, recipe.accelerate.num_processes
    return f"a batch of {training.batch_size} on {counted(processes, 'process', 'processes')}"


def _batches_possible(context: CheckContext, table: pl.DataFrame) -> Outcome:
    """Check that training uses every bucket, even with `underfilled: drop` (FAILURES B01, B09)."""
    recipe = context.recipe
    if table.is_empty():
        stages = ("raw_images", "validated_dataset", STAGE)
        rejected = pl.concat([context.tables.read_rejected(stage) for stage in stages])
        return no_samples_left(rejected, "start the job again")

    few, numbers = _batches(recipe, table)
    if not numbers["draws_per_epoch"]:
        samples = counted(table["sample_id"].n_unique(), "sample is", "samples are")
        summary = f"there are no training samples: {samples} in the holdout"
        fix = "lower datasets[].validation_fraction, or add images"
        return Outcome(False, summary, fix, (), numbers, final=True)
    if recipe.buckets.underfilled != "drop" or few.is_empty():
        fraction = numbers["in_full_batches"]
        return Outcome(True, f"{fraction:.1%} of an epoch is in full batches", numbers=numbers)

    samples = counted(int(few["draws"].sum()), "sample")
    summary = (
        f"{counted(len(few), 'bucket')} with {samples} {verb(len(few), 'does', 'do')} not fill "
        f"{_full_batch(recipe)} and would never be trained on, because underfilled is drop"
    )
    fix = "set buckets.underfilled to partial or repeat, lower training.batch_size, or use fewer buckets"
    return Outcome(False, summary, fix, few.rows(named=True), numbers)


def _underfilled(recipe: Recipe, table: pl.DataFrame) -> Outcome:
    few, numbers = _batches(recipe, table)
    if few.is_empty():
        return Outcome(True, f"every bucket fills {_full_batch(recipe)}", numbers=numbers)
    summary = f"{len(few)} of {counted(table['bucket'].n_unique(), 'bucket')} "
    summary += f"{verb(len(few), 'does', 'do')} not fill {_full_batch(recipe)}"
    fix = "fit the buckets to the dataset with latentline fit-buckets, raise buckets.step, or add images"
    return Outcome(False, summary, fix, few.rows(named=True), numbers)


def _crop_loss(recipe: Recipe, table: pl.DataFrame) -> Outcome:
    limit = recipe.buckets.max_crop_loss
    above = table.filter(pl.col("crop_loss") > limit).sort("crop_loss", "sample_id", descending=[True, False])
    worst = table["crop_loss"].to_numpy().max() if len(table) else 0.0
    numbers = {"limit": limit, "worst": round(float(worst), 4)}
    if above.is_empty():
        return Outcome(
            True, f"no image loses more than {limit:.0%}; the maximum is {worst:.1%}", numbers=numbers
        )

    rows = [
        {
            "sample_id": row["sample_id"],
            "crop_loss": round(row["crop_loss"], 4),
            "size": str(Size(row["height"], row["width"])),
            "bucket": row["bucket"],
        }
        for row in above.iter_rows(named=True)
    ]
    first = rows[0]
    summary = counted(len(above), "image loses", "images lose")
    summary += f" more than {limit:.0%} to the crop, the first: {first['sample_id']} "
    summary += f"({first['size']} to {first['bucket']}, {first['crop_loss']:.0%})"
    fix = "raise buckets.max_aspect_ratio, add sizes of these shapes, or crop the images yourself"
    return Outcome(False, summary, fix, rows, numbers)


def _slider_pairs(recipe: Recipe, table: pl.DataFrame) -> Outcome:
    scales = slider_scales(recipe)
    if not scales:
        return Outcome(True, "no dataset has a slider")
    sides = with_pairs(table, scales).filter(pl.col("slider").is_not_null())
    alone = sides.filter(pl.col("pair").is_null()).sort("sample_id", "bucket")
    numbers = {"pairs": sides["pair"].drop_nulls().n_unique(), "alone": len(alone)}
    if alone.is_empty():
        return Outcome(True, f"{counted(numbers['pairs'], 'pair')} of images", numbers=numbers)

    rows = alone.select("sample_id", "bucket", "slider").rows(named=True)
    summary = f"{len(alone)} of {counted(len(sides), 'image')} {verb(len(alone), 'lacks', 'lack')} a partner "
    summary += f"in the opposite dataset, the first: {rows[0]['sample_id']} (bucket {rows[0]['bucket']})"
    fix = "give both images of a pair the same name and the same size in pixels, or ignore the warning"
    return Outcome(False, summary, fix, rows, numbers)
