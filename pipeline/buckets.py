"""aspect_buckets: the geometry of each sample, by the one module that knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from pipeline.geometry import Buckets, ladder
from pipeline.reports import Log, Report, StageResult, Stopwatch
from pipeline.tables import SCHEMAS, empty

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

STAGE = "aspect_buckets"


def buckets_of(recipe: Recipe) -> Buckets:
    """The bucket sizes that the recipe's settings make.

    Raises:
        BucketError: No bucket can have these settings.
    """
    settings = recipe.buckets
    return ladder(settings.resolution, settings.step, settings.max_aspect_ratio)


def assign_buckets(recipe: Recipe, validated: pl.DataFrame, *, log: Log) -> StageResult:
    """Each sample of validated_dataset with its bucket, resized size and crop; none is rejected.

    A sample's row depends on its own size and the recipe's bucket settings only.

    Raises:
        BucketError: No bucket can have these settings.
    """
    watch = Stopwatch()
    columns = buckets_of(recipe).assign_many(validated["height"].to_numpy(), validated["width"].to_numpy())
    target = {"target_height": columns.target_height, "target_width": columns.target_width}
    resized = {"resized_height": columns.resized_height, "resized_width": columns.resized_width}
    crop = {"crop_top": columns.crop_top, "crop_left": columns.crop_left}
    measures = {"crop_loss": columns.crop_loss, "scale": columns.scale}
    table = (
        validated.with_columns(
            pl.Series(name, values) for name, values in (target | resized | crop | measures).items()
        )
        .with_columns(bucket=pl.format("{}x{}", "target_height", "target_width"))
        .select(pl.col(name).cast(kind) for name, kind in SCHEMAS[STAGE].items())
        .sort("sample_id")
    )
    counts = dict(table.group_by("bucket").len().sort("len", "bucket", descending=[True, False]).rows())
    for name, count in counts.items():
        log(f"bucket {name}: {count:,} samples")
    return StageResult(table, empty("rejected"), _report(table, counts) | watch.numbers())


def _report(table: pl.DataFrame, counts: dict[str, int]) -> Report:
    """Crop loss is the share of a resized image that is cut off; upscaled is a share of the samples."""
    return {
        "samples": len(table),
        "in": len(table),
        "kept": len(table),
        "rejected": 0,
        "num_buckets": len(counts),
        "buckets": counts,
        "crop_loss_mean": _mean(table["crop_loss"]),
        "crop_loss_max": _mean(table["crop_loss"].top_k(1)),
        "upscaled": _mean((table["scale"] > 1).cast(pl.Float64)),
    }


def _mean(values: pl.Series) -> float:
    return float(values.to_numpy().mean()) if len(values) else 0.0
