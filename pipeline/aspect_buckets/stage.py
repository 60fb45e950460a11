"""Stage 3, aspect_buckets: assign each sample to a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import counted
from pipeline.images.geometry import placements_of
from pipeline.log import Log
from pipeline.reporting.reports import Report, StageResult, Stopwatch
from pipeline.storage import tables as table_files
from pipeline.storage.tables import columns_in

if TYPE_CHECKING:
    from pipeline.images.geometry import Placement
    from pipeline.recipe import Recipe

STAGE = "aspect_buckets"

CHUNK_ROWS = 10_000
"""Number of samples per call of the geometry."""

MAX_LOGGED_BUCKETS = 8
"""Maximum number of buckets in the log. The report and its chart have all of them."""

TOO_SMALL = "too_small"
"""Reason code of images that the recipe rejects because of their size; the file itself is valid."""


def assign_buckets(recipe: Recipe, validated: pl.DataFrame, *, log: Log) -> StageResult:
    """Return the bucket, resized size and crop of each sample of validated_dataset.

    A sample has one row, or with `per_image: each` one row per resolution that it fills. The result depends
    only on the sample's size, id and focus point and on the recipe's bucket settings.

    Raises:
        BucketError: The bucket settings allow no bucket.
    """
    watch = Stopwatch()
    parts = rows_by_placement(recipe, validated)
    # In chunks, because the geometry's temporary arrays take half a kilobyte per sample.
    chunks = [_place(placement, chunk) for placement, rows in parts for chunk in rows.iter_slices(CHUNK_ROWS)]
    placed = pl.concat(chunks) if chunks else _place(parts[0][0], validated)

    table = placed.filter(~pl.col("too_small")).drop("too_small").sort("sample_id", "bucket")
    rejected = [_rejected_row(recipe, row) for row in placed.filter("too_small").iter_rows(named=True)]

    # The log, the report and its chart list the largest buckets first.
    counts = dict(table.group_by("bucket").len().sort("len", "bucket", descending=[True, False]).rows())
    log(_buckets_text(counts))
    if rejected:
        images = counted(len(rejected), "image is", "images are")
        log(f"{images} too small for upscale: {recipe.buckets.upscale}")

    report = _report(table, counts, len(rejected)) | watch.numbers()
    return StageResult(table, table_files.frame("rejected", rejected), report)


def rows_by_placement(recipe: Recipe, rows: pl.DataFrame) -> list[tuple[Placement, pl.DataFrame]]:
    """Return the rows of the datasets with the same rules, with these rules; `rows` need `dataset`.

    Raises:
        BucketError: The bucket settings allow no bucket.
    """
    placements = placements_of(recipe)
    if len(placements) == 1:
        return [(placements[0][0], rows)]
    return [(placement, rows.filter(pl.col("dataset").is_in(names))) for placement, names in placements]


def _place(placement: Placement, samples: pl.DataFrame) -> pl.DataFrame:
    """Return the columns of the table and `too_small`, with at least one row per sample."""
    # Only random crops depend on names; any other placement must not, so that renaming changes no key.
    names = samples["sample_id"] if placement.crop == "random" else None
    focus = (samples["focus_y"].to_numpy(), samples["focus_x"].to_numpy())
    placed = placement.assign_many(samples["height"].to_numpy(), samples["width"].to_numpy(), names, focus)

    geometry = placed.columns
    computed = pl.DataFrame(
        {
            "target_height": geometry.target_height,
            "target_width": geometry.target_width,
            "resized_height": geometry.resized_height,
            "resized_width": geometry.resized_width,
            "crop_top": geometry.crop_top,
            "crop_left": geometry.crop_left,
            "crop_loss": geometry.crop_loss,
            "scale": geometry.scale,
            "too_small": placed.too_small,
        }
    ).with_columns(bucket=pl.format("{}x{}", "target_height", "target_width"))

    columns = columns_in(STAGE, samples)

    # Columns of side inputs come along, because the cache stages read this table alone.
    inherited = samples.select(name for name in columns if name in samples.columns)
    rows = inherited[placed.image].hstack(computed)
    return rows.select(*(pl.col(name).cast(dtype) for name, dtype in columns.items()), "too_small")


def _rejected_row(recipe: Recipe, row: dict[str, Any]) -> dict[str, Any]:
    size, target = f"{row['height']}x{row['width']}", f"{row['target_height']}x{row['target_width']}"
    rejection = {
        "stage": STAGE,
        "reason": TOO_SMALL,
        "detail": f"{size} pixels would be enlarged {row['scale']:.2f} times to fill bucket {target} "
        f"(height x width), but upscale is {recipe.buckets.upscale}",
        "fix": "use a larger image, a smaller resolution, or buckets.small_images: own_bucket",
    }
    return {name: {**row, **rejection}[name] for name in table_files.REJECTED}


def _buckets_text(counts: dict[str, int]) -> str:
    largest = [f"{name} {count:,}" for name, count in list(counts.items())[:MAX_LOGGED_BUCKETS]]
    if len(counts) > MAX_LOGGED_BUCKETS:
        largest.append(f"{len(counts) - MAX_LOGGED_BUCKETS:,} more in the report")
    return f"{counted(len(counts), 'bucket')} (height x width), samples: {', '.join(largest) or 'none'}"


def _report(table: pl.DataFrame, counts: dict[str, int], num_rejected: int) -> Report:
    # Crop loss is a fraction of the resized area, `upscaled` a fraction of the rows.
    num_samples = table["sample_id"].n_unique()
    return {
        "samples": num_samples,
        "rows": len(table),
        "in": num_samples + num_rejected,
        "kept": num_samples,
        "rejected": num_rejected,
        "num_buckets": len(counts),
        "buckets": counts,
        "crop_loss_mean": table["crop_loss"].mean() or 0.0,
        "crop_loss_max": table["crop_loss"].max() or 0.0,
        "upscaled": (table["scale"] > 1).mean() or 0.0,
    }
