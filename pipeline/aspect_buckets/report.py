"""The report of aspect_buckets: a table of buckets, and pictures of sizes and crops.

    reports/aspect_buckets/buckets.parquet    one row per bucket
    reports/aspect_buckets/sizes.png          original sizes, and a line for each bucket's aspect ratio
    reports/aspect_buckets/crops.jpg          thumbnails of each bucket, with the cropped parts darkened
    reports/aspect_buckets/worst_crops.jpg    the images that lose most to the crop

The files are written again only if the table has changed.
"""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from pipeline.images.geometry import Geometry
from pipeline.log import Log
from pipeline.raw_images.sources import sources_of
from pipeline.reporting.grids import evenly_spaced
from pipeline.reporting.pictures import SheetImage, SheetRow, chart, contact_sheet, png
from pipeline.reporting.reports import is_current, mark_current
from pipeline.storage.atomic import write_atomically, write_bytes
from pipeline.storage.source import Source
from pipeline.storage.tables import content_digest, write_rows
from pipeline.validated_dataset.holdout import times_drawn

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

FOLDER = "aspect_buckets"
BUCKETS_FILE, SIZES_FILE = "buckets.parquet", "sizes.png"
CROPS_FILE, WORST_FILE = "crops.jpg", "worst_crops.jpg"

_REPORT_FORMAT = "2: names"
"""Part of the digest, so that reports of earlier versions are drawn again."""

NUM_WORST_CROPS = 20
NUM_BUCKETS_SHOWN = 10
IMAGES_PER_ROW = 6

MIN_AXIS_RATIO = 2.0
"""Smallest ratio of the ends of the axes in the chart of sizes."""

MAX_POINTS = 5000
"""Maximum number of images in the chart of sizes; more are sampled."""


def write_bucket_report(recipe: Recipe, table: pl.DataFrame, *, log: Log) -> Path:
    """Write the bucket table and the pictures, unless they are up to date, and return their folder.

    An image that cannot be read any more is shown as an empty frame.
    """
    folder = recipe.output_dir / "reports" / FOLDER
    buckets = bucket_table(recipe, table)
    digest = _digest(table, buckets)
    if is_current(folder, digest):
        return folder

    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / BUCKETS_FILE, partial(write_rows, buckets))
    if len(table):
        write_bytes(folder / SIZES_FILE, _sizes_chart(table))
        write_bytes(folder / CROPS_FILE, _crops_sheet(recipe, table, buckets, log))
        write_bytes(folder / WORST_FILE, _worst_crops_sheet(recipe, table, log))

    # The digest comes last, so that an interrupted report is written again.
    mark_current(folder, digest)
    return folder


def bucket_table(recipe: Recipe, table: pl.DataFrame) -> pl.DataFrame:
    """Return one row per bucket, the fullest first.

    Columns: bucket, samples, draws (per epoch, with repeats and without the holdout), full_batches,
    in_partial_batch (draws that do not fill a batch), crop_loss_mean, crop_loss_max, upscaled (fraction of
    the samples that are enlarged).
    """
    # All processes draw one batch from the same bucket at the same time.
    batch_size = recipe.training.batch_size * recipe.accelerate.num_processes

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
        .with_columns(
            full_batches=pl.col("draws") // batch_size, in_partial_batch=pl.col("draws") % batch_size
        )
        .select(
            *("bucket", "samples", "draws", "full_batches", "in_partial_batch"),
            *("crop_loss_mean", "crop_loss_max", "upscaled"),
        )
        .sort("samples", "bucket", descending=[True, False])
    )


def _digest(table: pl.DataFrame, buckets: pl.DataFrame) -> str:
    columns = ("sample_id", "content_hash", "bucket", "crop_top", "crop_left", "height", "width")
    return content_digest(table.select(columns), buckets, more=_REPORT_FORMAT)


def _sheet_images(rows: pl.DataFrame, sources: Mapping[str, Source]) -> list[SheetImage]:
    return [
        SheetImage(
            sources[row["dataset"]].file(row["path"]),
            (row["height"], row["width"]),
            Geometry.from_row(row).source_box,
            name=posixpath.basename(row["path"]),
        )
        for row in rows.iter_rows(named=True)
    ]


def _crops_sheet(recipe: Recipe, table: pl.DataFrame, buckets: pl.DataFrame, log: Log) -> bytes:
    sheet_rows: list[SheetRow] = []
    sources = sources_of(recipe)
    by_loss = table.sort("crop_loss", "sample_id", descending=[True, False])
    for bucket, num_samples in buckets.select("bucket", "samples").head(NUM_BUCKETS_SHOWN).iter_rows():
        samples = by_loss.filter(pl.col("bucket") == bucket)

        # Evenly spaced, so that the row shows the bucket's largest loss, its smallest, and losses between.
        images = _sheet_images(samples[evenly_spaced(len(samples), IMAGES_PER_ROW)], sources)
        sheet_rows.append(SheetRow(f"{bucket}: {num_samples:,}", images))
    title = "Buckets (height x width) and their number of images; the crop removes the dark parts"
    return contact_sheet(sheet_rows, title=title, log=log)


def _worst_crops_sheet(recipe: Recipe, table: pl.DataFrame, log: Log) -> bytes:
    worst = table.sort("crop_loss", "sample_id", descending=[True, False]).head(NUM_WORST_CROPS)
    sheet_rows: list[SheetRow] = []
    sources = sources_of(recipe)
    for samples in worst.iter_slices(IMAGES_PER_ROW):
        losses = samples["crop_loss"]
        label = f"lose {losses[0]:.0%} to {losses[-1]:.0%}"
        sheet_rows.append(SheetRow(label, _sheet_images(samples, sources)))
    title = "Images that lose most to the crop; it removes the dark parts"
    return contact_sheet(sheet_rows, title=title, log=log)


def _sizes_chart(table: pl.DataFrame) -> bytes:
    figure, axes = chart()

    points = table.sample(min(MAX_POINTS, len(table)), seed=0)
    for is_enlarged, colour, label in ((False, "tab:blue", "images"), (True, "tab:red", "enlarged images")):
        group = points.filter((pl.col("scale") > 1) == is_enlarged)
        if len(group):
            axes.scatter(group["width"], group["height"], s=9, color=colour, label=f"{label}: {len(group):,}")

    targets = table.select("target_width", "target_height").unique().sort("target_width", "target_height")
    widths, heights = targets["target_width"], targets["target_height"]
    axes.scatter(widths, heights, s=26, marker="s", facecolors="none", edgecolors="green", label="buckets")
    axes.set(xscale="log", yscale="log", xlabel="width in px", ylabel="height in px", aspect="equal")

    # The lines of aspect ratios would extend the limits, so they are restored afterwards.
    low = min(axes.get_xlim()[0], axes.get_ylim()[0])
    high = max(axes.get_xlim()[1], axes.get_ylim()[1])
    if high < MIN_AXIS_RATIO * low:  # one image, or images of one size, would fill the axes
        low, high = low / MIN_AXIS_RATIO, high * MIN_AXIS_RATIO
    for width, height in targets.iter_rows():
        axes.axline((width, height), (width * math.e, height * math.e), color="green", alpha=0.3, lw=0.7)
    axes.set(xlim=(low, high), ylim=(low, high))

    axes.legend(loc="upper left", fontsize="small")
    return png(figure)
