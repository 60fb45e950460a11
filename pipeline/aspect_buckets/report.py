"""What aspect_buckets looks like: a table for machines, and pictures of sizes, buckets and crops.

    reports/aspect_buckets/buckets.parquet    one row a bucket
    reports/aspect_buckets/sizes.png          original sizes, and a line of each bucket's aspect ratio
    reports/aspect_buckets/crops.jpg          a strip of thumbnails a bucket, what is cropped away darkened
    reports/aspect_buckets/worst_crops.jpg    the images that lose most

They are made anew only when the table has changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from pipeline.images.geometry import Geometry
from pipeline.reporting.pictures import SheetImage, SheetRow, chart, contact_sheet, png
from pipeline.reporting.reports import Log
from pipeline.storage.atomic import write_atomically, write_bytes, write_text
from pipeline.storage.source import Source, source_at
from pipeline.storage.tables import content_digest
from pipeline.validated_dataset.holdout import times_drawn

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

FOLDER = "aspect_buckets"
BUCKETS_FILE, SIZES_FILE = "buckets.parquet", "sizes.png"
CROPS_FILE, WORST_FILE = "crops.jpg", "worst_crops.jpg"
_MADE_FOR = "made_for.txt"

NUM_WORST = 20
NUM_STRIPS = 10
NUM_IN_STRIP = 6
MAX_POINTS = 5000


def write_bucket_report(recipe: Recipe, table: pl.DataFrame, *, log: Log) -> Path:
    """Write the bucket table and the pictures below `output_dir/reports`, unless they are of this table.

    An image that cannot be read any more is shown as an empty frame.

    Args:
        recipe: Of the table; its batch size and repeats decide how full the batches are.
        table: aspect_buckets.
        log: Told how far it is.

    Returns:
        The folder.
    """
    folder = recipe.output_dir / "reports" / FOLDER
    made_for = folder / _MADE_FOR
    buckets = bucket_table(recipe, table)
    digest = _digest(table, buckets)
    if made_for.is_file() and made_for.read_text(encoding="utf-8") == digest:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / BUCKETS_FILE, buckets.write_parquet)
    if len(table):
        write_bytes(folder / SIZES_FILE, _sizes(table))
        write_bytes(folder / CROPS_FILE, _crops(recipe, table, buckets, log))
        write_bytes(folder / WORST_FILE, _worst_crops(recipe, table, log))
    write_text(made_for, digest)
    return folder


def bucket_table(recipe: Recipe, table: pl.DataFrame) -> pl.DataFrame:
    """One row a bucket, the fullest first.

    Columns: bucket, samples, draws (an epoch's, repeats counted, of what is held out for validation none),
    full_batches, in_partial_batch (draws left over), crop_loss_mean, crop_loss_max, upscaled (share of the
    samples that are enlarged).
    """
    at_once = recipe.training.batch_size * recipe.accelerate.num_processes
    return (
        table.with_columns(times=times_drawn(table, recipe.datasets))
        .group_by("bucket")
        .agg(
            samples=pl.len().cast(pl.Int64),
            draws=pl.col("times").sum(),
            crop_loss_mean=pl.col("crop_loss").mean(),
            crop_loss_max=pl.col("crop_loss").max(),
            upscaled=(pl.col("scale") > 1).mean(),
        )
        .with_columns(full_batches=pl.col("draws") // at_once, in_partial_batch=pl.col("draws") % at_once)
        .select(
            *("bucket", "samples", "draws", "full_batches", "in_partial_batch"),
            *("crop_loss_mean", "crop_loss_max", "upscaled"),
        )
        .sort("samples", "bucket", descending=[True, False])
    )


def _digest(table: pl.DataFrame, buckets: pl.DataFrame) -> str:
    columns = ("sample_id", "content_hash", "bucket", "crop_top", "crop_left", "height", "width")
    return content_digest(table.select(columns), buckets)


def _shown(table: pl.DataFrame, sources: Mapping[str, Source]) -> list[SheetImage]:
    shown: list[SheetImage] = []
    for row in table.iter_rows(named=True):
        geometry = Geometry.from_row(row)
        file = sources[row["dataset"]].file(row["path"])
        shown.append(SheetImage(file, (row["height"], row["width"]), geometry.source_box))
    return shown


def _sources(recipe: Recipe) -> dict[str, Source]:
    return {settings.name: source_at(settings.root) for settings in recipe.datasets}


def _crops(recipe: Recipe, table: pl.DataFrame, buckets: pl.DataFrame, log: Log) -> bytes:
    """A strip for each of the fullest buckets: samples evenly spread from its worst crop to its least."""
    strips: list[SheetRow] = []
    sources = _sources(recipe)
    by_loss = table.sort("crop_loss", "sample_id", descending=[True, False])
    for bucket, samples in buckets.select("bucket", "samples").head(NUM_STRIPS).iter_rows():
        rows = by_loss.filter(pl.col("bucket") == bucket)
        number = min(NUM_IN_STRIP, len(rows))
        places = [round(index * (len(rows) - 1) / max(1, number - 1)) for index in range(number)]
        strips.append(SheetRow(f"{bucket}: {samples:,}", _shown(rows[places], sources)))
    return contact_sheet(strips, log=log)


def _worst_crops(recipe: Recipe, table: pl.DataFrame, log: Log) -> bytes:
    worst = table.sort("crop_loss", "sample_id", descending=[True, False]).head(NUM_WORST)
    strips: list[SheetRow] = []
    sources = _sources(recipe)
    for rows in worst.iter_slices(NUM_IN_STRIP):
        losses = rows["crop_loss"]
        strips.append(SheetRow(f"lose {losses[0]:.0%} to {losses[-1]:.0%}", _shown(rows, sources)))
    return contact_sheet(strips, log=log)


def _sizes(table: pl.DataFrame) -> bytes:
    """Original widths and heights on logarithmic axes; through each bucket a line of its aspect ratio.

    Of more than `MAX_POINTS` images a sample is drawn, the same each time.
    """
    figure, axes = chart()
    points = table.sample(min(MAX_POINTS, len(table)), seed=0)
    for enlarged, colour, label in ((False, "tab:blue", "images"), (True, "tab:red", "enlarged images")):
        some = points.filter((pl.col("scale") > 1) == enlarged)
        if len(some):
            axes.scatter(some["width"], some["height"], s=9, color=colour, label=f"{label}: {len(some):,}")
    targets = table.select("target_width", "target_height").unique().sort("target_width", "target_height")
    widths, heights = targets["target_width"], targets["target_height"]
    axes.scatter(widths, heights, s=26, marker="s", facecolors="none", edgecolors="green", label="buckets")
    axes.set(xscale="log", yscale="log", xlabel="width in px", ylabel="height in px", aspect="equal")
    low = min(axes.get_xlim()[0], axes.get_ylim()[0])
    high = max(axes.get_xlim()[1], axes.get_ylim()[1])
    for width, height in targets.iter_rows():
        axes.axline((width, height), (width * math.e, height * math.e), color="green", alpha=0.3, lw=0.7)
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.legend(loc="upper left", fontsize="small")
    return png(figure)
