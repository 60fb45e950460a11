"""The checks of aspect_buckets: each sample assigned once, to a size that the model can divide."""

from __future__ import annotations

import numpy as np
import polars as pl

from pipeline.checks.base import CheckContext, Finding, Outcome, findings, outliers
from pipeline.checks.conservation import conserved
from pipeline.geometry import Size, not_multiples

STAGE = "aspect_buckets"


def run(context: CheckContext) -> list[Finding]:
    """One finding for each check of aspect_buckets, from its table and the base model's configuration.

    Raises:
        TableError: There is no table of validated_dataset or aspect_buckets.
        ModelError: The recipe's base model cannot be found, or is of no known family.
    """
    from pipeline.families import detect
    from pipeline.model_source import resolve_base

    table = context.tables.read(STAGE)
    rejected = context.tables.read_rejected(STAGE)["sample_id"]
    before = context.tables.read("validated_dataset")["sample_id"]
    multiple = detect(resolve_base(context.recipe)).size_multiple()
    outcomes = {
        "conservation": conserved(before, table["sample_id"], rejected, STAGE),
        "shape_uniformity": _shape_uniformity(table, multiple),
        "file_size_outliers": _file_size_outliers(table),
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
        summary = f"{numbers['buckets']} buckets, each of one size divisible by {multiple}"
        return Outcome(True, summary, numbers=numbers)
    first = rows[0]
    summary = f"{len(rows):,} problems with sizes, the first: {first.get('bucket', first.get('sample_id'))} "
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
        return Outcome(True, f"{len(counts)} buckets, {told}", numbers=numbers)
    summary = (
        f"{len(few)} of {len(counts)} buckets have far fewer samples than the median of {found.median:g}"
    )
    fix = "add images of these shapes, raise buckets.step, or lower buckets.max_aspect_ratio"
    return Outcome(False, summary, fix, few.rows(named=True), numbers)
