"""aspect_buckets: the geometry of each sample, by the one module that knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import counted
from pipeline.images.geometry import placement_of
from pipeline.reporting.reports import Log, Report, StageResult, Stopwatch
from pipeline.storage import tables as table_files
from pipeline.storage.tables import SCHEMAS, in_order, only

if TYPE_CHECKING:
    from pipeline.images.geometry import Placement
    from pipeline.recipe import Recipe

STAGE = "aspect_buckets"

_ROWS_AT_ONCE = 10_000
"""Whose geometry is worked out together: what is in between takes half a kilobyte of each."""

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
    parts = [_placed(placement, part) for part in validated.iter_slices(_ROWS_AT_ONCE)]
    everything = pl.concat(parts) if parts else _placed(placement, validated)
    kept = only(everything, ~everything["too_small"]).drop("too_small")
    table = in_order(kept, ["sample_id", "bucket"])
    rejected = [_rejected(recipe, row) for row in everything.filter("too_small").iter_rows(named=True)]
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


def _placed(placement: Placement, rows: pl.DataFrame) -> pl.DataFrame:
    """The columns of the table, and whether the recipe leaves the row out for being `too_small`."""
    names = rows["sample_id"] if placement.crop == "random" else None
    focus = (rows["focus_y"].to_numpy(), rows["focus_x"].to_numpy())
    placed = placement.assign_many(rows["height"].to_numpy(), rows["width"].to_numpy(), names, focus)
    columns = placed.columns
    target = {"target_height": columns.target_height, "target_width": columns.target_width}
    resized = {"resized_height": columns.resized_height, "resized_width": columns.resized_width}
    crop = {"crop_top": columns.crop_top, "crop_left": columns.crop_left}
    measures = {"crop_loss": columns.crop_loss, "scale": columns.scale, "too_small": placed.too_small}
    made = pl.DataFrame(target | resized | crop | measures)
    known = rows.select(name for name in SCHEMAS[STAGE] if name in rows.columns)
    known = known if len(made) == len(rows) else known[placed.image]  # an image has a row at least
    whole = known.hstack(made).with_columns(bucket=pl.format("{}x{}", "target_height", "target_width"))
    return whole.select(*(pl.col(name).cast(kind) for name, kind in SCHEMAS[STAGE].items()), "too_small")


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
