"""aspect_buckets: the geometry of each sample, by the one module that knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline import tables as table_files
from pipeline.counting import counted
from pipeline.geometry import placement_of
from pipeline.reports import Log, Report, StageResult, Stopwatch
from pipeline.tables import SCHEMAS

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

STAGE = "aspect_buckets"

TOO_SMALL = "too_small"
"""Reason of a rejection that the recipe asked for: it says nothing bad of the image."""


def assign_buckets(recipe: Recipe, validated: pl.DataFrame, *, log: Log) -> StageResult:
    """Each sample of validated_dataset with its bucket, resized size and crop.

    A sample has a row, or with `per_image: each` one for each resolution that it fills. These depend on its
    own size, name and focus and the recipe's bucket settings only. Rejected are the images that `upscale`
    forbids to enlarge, where `small_images` says so.

    Raises:
        BucketError: No bucket can have these settings.
    """
    watch = Stopwatch()
    placement = placement_of(recipe.buckets)
    names = validated["sample_id"] if placement.crop == "random" else None
    focus = (validated["focus_y"].to_numpy(), validated["focus_x"].to_numpy())
    placed = placement.assign_many(
        validated["height"].to_numpy(), validated["width"].to_numpy(), names, focus
    )
    columns = placed.columns
    target = {"target_height": columns.target_height, "target_width": columns.target_width}
    resized = {"resized_height": columns.resized_height, "resized_width": columns.resized_width}
    crop = {"crop_top": columns.crop_top, "crop_left": columns.crop_left}
    measures = {"crop_loss": columns.crop_loss, "scale": columns.scale}
    everything = validated[placed.image].with_columns(
        pl.Series(name, values) for name, values in (target | resized | crop | measures).items()
    )
    too_small = pl.Series(placed.too_small, dtype=pl.Boolean)
    table = (
        everything.filter(~too_small)
        .with_columns(bucket=pl.format("{}x{}", "target_height", "target_width"))
        .select(pl.col(name).cast(kind) for name, kind in SCHEMAS[STAGE].items())
        .sort("sample_id", "bucket")
    )
    rejected = [_rejected(recipe, row) for row in everything.filter(too_small).iter_rows(named=True)]
    counts = dict(table.group_by("bucket").len().sort("len", "bucket", descending=[True, False]).rows())
    for name, count in counts.items():
        log(f"bucket {name}: {counted(count, 'sample')}")
    if rejected:
        log(
            counted(len(rejected), "image is", "images are")
            + f" too small for upscale: {recipe.buckets.upscale}"
        )
    report = _report(table, counts, len(rejected)) | watch.numbers()
    return StageResult(table, table_files.frame("rejected", rejected), report)


def _rejected(recipe: Recipe, row: dict[str, Any]) -> dict[str, Any]:
    size, target = (f"{row[f'{kind}height']}x{row[f'{kind}width']}" for kind in ("", "target_"))
    settings = recipe.buckets
    added = {
        "stage": STAGE,
        "reason": TOO_SMALL,
        "detail": f"{size} pixels would be enlarged {row['scale']:.2f} times to its bucket {target}, "
        f"and upscale is {settings.upscale}",
        "fix": "use a larger image, a smaller resolution, or buckets.small_images: own_bucket",
    }
    return {name: {**row, **added}[name] for name in table_files.REJECTED}


def _report(table: pl.DataFrame, counts: dict[str, int], rejected: int) -> Report:
    """Crop loss is the share of a resized image that is cut off; upscaled is a share of the samples."""
    samples = table["sample_id"].n_unique()
    return {
        "samples": samples,
        "rows": len(table),
        "in": samples + rejected,
        "kept": samples,
        "rejected": rejected,
        "num_buckets": len(counts),
        "buckets": counts,
        "crop_loss_mean": _mean(table["crop_loss"]),
        "crop_loss_max": _mean(table["crop_loss"].top_k(1)),
        "upscaled": _mean((table["scale"] > 1).cast(pl.Float64)),
    }


def _mean(values: pl.Series) -> float:
    return float(values.to_numpy().mean()) if len(values) else 0.0
