"""Checks of the pictures themselves: sharpness, exposure, bars, overlays, subjects and variety of views.

Each kind of finding has a measured number and a limit; docs/dataset_checks.md shows how the limits were
chosen. The contact sheet `reports/validated_dataset/findings.jpg` shows the worst images of each kind.

To add a kind, measure a value in `images/pixel_values.py` and add a `Kind` to `KINDS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import counted
from pipeline.reporting.findings import Outcome
from pipeline.storage.table_columns import PICTURE_COLUMNS
from pipeline.validated_dataset.duplicates import MAX_VIEWS

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

MIN_SHARPNESS = 0.4
"""Detail at the training size, relative to the most that the size can show."""

MIN_RELATIVE_SHARPNESS = 0.6
"""The same, relative to the median of the dataset."""

MIN_JPEG_QUALITY = 50
"""Quality of libjpeg with the same quantization; 75 is the default of libjpeg and Pillow."""

MIN_BRIGHTEST = 0.4
"""Level that 1% of the pixels must exceed in a channel, 0 to 1."""

MIN_CONTRAST = 0.3
"""Difference of the highest and the lowest level, relative to their sum (Michelson)."""

MAX_WHITE = 0.2
"""Fraction of white pixels above the median of the dataset."""

MAX_BARS = 0.02
"""Fraction of the area that bars cover."""

MAX_OVERLAY = 0.5
"""Agreement with an overlay that repeats."""

MIN_SUBJECT_PX = 32
"""Square root of a subject's area at the training size; smaller objects are "small" in COCO (2014)."""

MAX_VIEW_SHARE = 0.2
"""Fraction of the images that may show nearly one view."""

MIN_VIEW_IMAGES = 3
"""Smallest number of images with nearly one view that is reported."""

_OLD_TABLE = "not measured: the table was written by an older release"


@dataclass(frozen=True)
class Kind:
    """A kind of finding.

    Attributes:
        check: Check that reports it.
        what: What the images are, as in "3 images are ...".
        value: Measured number of an image; null where it does not apply.
        limit: Limit of the value.
        is_minimum: Whether values below the limit are findings, or values above it.
        shown: Format of the value for people.
        fix: What to do.
    """

    check: str
    what: str
    value: pl.Expr
    limit: float | pl.Expr
    is_minimum: bool
    shown: str
    fix: str


_TRAINING_PX = pl.col("training_px")
"""Edge of a square bucket of the lowest resolution, which `picture_findings` adds to the table."""

# An image that is reduced for training needs detail at the training size only.
_EDGE_PX = (pl.col("height").cast(pl.Float64) * pl.col("width")).sqrt()
_SHARPNESS = (pl.col("detail_px") / _EDGE_PX.clip(upper_bound=_TRAINING_PX)).clip(upper_bound=1)

KINDS = (
    Kind(
        "pictures_sharp",
        "blurred or enlarged",
        _SHARPNESS,
        pl.max_horizontal(MIN_SHARPNESS, MIN_RELATIVE_SHARPNESS * _SHARPNESS.median()),
        True,
        "detail {:.0%}",
        "replace blurred and enlarged images by sharper originals, or remove them",
    ),
    Kind(
        "pictures_sharp",
        "strongly compressed",
        pl.col("jpeg_quality").cast(pl.Float64),
        MIN_JPEG_QUALITY,
        True,
        "JPEG quality {:.0f}",
        "replace strongly compressed images by their originals; training learns the blocks",
    ),
    Kind(
        "pictures_exposed",
        "dark",
        pl.col("brightest"),
        MIN_BRIGHTEST,
        True,
        "brightest {:.0%}",
        "brighten dark images in an editor, or name the darkness in their captions",
    ),
    Kind(
        "pictures_exposed",
        "overexposed",
        pl.col("white") - pl.col("white").median(),
        MAX_WHITE,
        False,
        "{:.0%} more white than usual",
        "export overexposed images again with less exposure; a white background is fine if the captions "
        "name it",
    ),
    Kind(
        "pictures_exposed",
        "flat",
        pl.col("contrast"),
        MIN_CONTRAST,
        True,
        "contrast {:.0%}",
        "raise the contrast of flat images in an editor, or remove them",
    ),
    Kind(
        "pictures_unframed",
        "framed by bars",
        pl.col("bars"),
        MAX_BARS,
        False,
        "bars {:.0%}",
        "cut the bars off; training draws them too",
    ),
    Kind(
        "pictures_unframed",
        "marked in one corner",
        pl.col("overlay"),
        MAX_OVERLAY,
        False,
        "agreement {:.0%}",
        "cut off, retouch or mask the mark that repeats in a corner; training draws it too",
    ),
    Kind(
        "subjects_visible",
        "small in the picture",
        pl.col("mask_mean").sqrt() * _TRAINING_PX,
        MIN_SUBJECT_PX,
        True,
        "{:.0f} px",
        "crop the images around small subjects, or train at a higher buckets.resolution",
    ),
    Kind(
        "subjects_visible",
        "centred at an edge",
        pl.min_horizontal("focus_x", 1 - pl.col("focus_x"), "focus_y", 1 - pl.col("focus_y")) * _TRAINING_PX,
        MIN_SUBJECT_PX / 2,
        True,
        "{:.0f} px from an edge",
        "use images that show the complete subject, or correct the columns in focus_columns",
    ),
)
"""All kinds of findings about single images."""


def picture_findings(recipe: Recipe, table: pl.DataFrame) -> pl.DataFrame:
    """Return the images of each kind: `sample_id`, `kind` (its index) and `value`, worst first.

    `table` is validated_dataset. A kind finds nothing in a table without its columns.
    """
    buckets = recipe.buckets
    training_px = min(buckets.resolutions or [buckets.resolution])
    # An image of one colour has a check of its own.
    table = table.filter(~pl.col("one_colour")).with_columns(training_px=pl.lit(training_px))
    parts = [pl.DataFrame(schema={"sample_id": pl.String, "kind": pl.Int32, "value": pl.Float64})]
    for index, kind in enumerate(KINDS):
        if set(kind.value.meta.root_names()) <= set(table.columns):
            is_found = kind.value < kind.limit if kind.is_minimum else kind.value > kind.limit
            found = table.select("sample_id", value=kind.value, is_found=is_found).filter("is_found")
            found = found.sort("value", "sample_id", descending=[not kind.is_minimum, False])
            parts.append(found.select("sample_id", kind=pl.lit(index, pl.Int32), value="value"))
    return pl.concat(parts)


def shown_value(kind: Kind, value: float) -> str:
    """Return the measured value as text."""
    return kind.shown.format(value)


def picture_outcomes(recipe: Recipe, table: pl.DataFrame) -> dict[str, Outcome]:
    """Return the outcomes of the checks of single pictures and of their variety, by name."""
    found = picture_findings(recipe, table)
    outcomes: dict[str, Outcome] = {}
    for check in dict.fromkeys(kind.check for kind in KINDS):
        own = {index: kind for index, kind in enumerate(KINDS) if kind.check == check}
        outcomes[check] = _outcome(own, found.filter(pl.col("kind").is_in(list(own))), table)
    return {**outcomes, "views_varied": _views_varied(table)}


def _outcome(own: Mapping[int, Kind], found: pl.DataFrame, table: pl.DataFrame) -> Outcome:
    numbers = {
        kind.what.replace(" ", "_"): len(found.filter(pl.col("kind") == index)) for index, kind in own.items()
    }
    if found.is_empty():
        if not set(PICTURE_COLUMNS) <= set(table.columns):
            return Outcome(True, _OLD_TABLE, numbers=numbers)
        what = " or ".join(kind.what for kind in own.values())
        return Outcome(True, f"none of {counted(len(table), 'image')} is {what}", numbers=numbers)

    rows: list[dict[str, Any]] = []
    texts: list[str] = []
    fixes: list[str] = []
    for index, kind in own.items():
        of_kind = [
            {"sample_id": sample_id, "what": kind.what, "value": shown_value(kind, value)}
            for sample_id, value in found.filter(pl.col("kind") == index).select("sample_id", "value").rows()
        ]
        if of_kind:
            worst = f"{of_kind[0]['sample_id']} ({of_kind[0]['value']})"
            texts.append(f"{counted(len(of_kind), 'image is', 'images are')} {kind.what}, worst {worst}")
            fixes.append(kind.fix)
            rows += of_kind
    fixes.append("reports/validated_dataset/findings.jpg shows the worst")
    return Outcome(False, "; ".join(texts), "; ".join(fixes), rows, numbers)


def large_view_groups(table: pl.DataFrame) -> pl.DataFrame:
    """Return `view_group` and `sample_id`, a sorted list, of each view that too many images show."""
    if "view_group" not in table.columns:
        return pl.DataFrame(schema={"view_group": pl.String, "sample_id": pl.List(pl.String)})
    groups = table.drop_nulls("view_group").group_by("view_group").agg(pl.col("sample_id").sort())
    size = pl.col("sample_id").list.len()
    groups = groups.filter(size >= MIN_VIEW_IMAGES, size > MAX_VIEW_SHARE * len(table))
    return groups.sort(size, "view_group", descending=[True, False])


def _views_varied(table: pl.DataFrame) -> Outcome:
    groups = large_view_groups(table)
    num_views = table["view_group"].n_unique() if "view_group" in table.columns else 0
    numbers = {"views": num_views, "images": len(table)}
    if groups.is_empty():
        summary = f"{counted(len(table), 'image')} with {counted(num_views, 'view')}"
        if not num_views:
            summary = _OLD_TABLE
        elif table["view_group"].null_count() == len(table):
            summary = f"not measured: more than {MAX_VIEWS:,} images"
        return Outcome(True, summary, numbers=numbers)
    rows = [{"images": " | ".join(ids), "number": len(ids)} for ids in groups["sample_id"]]
    first = groups["sample_id"][0]
    summary = (
        f"{len(first):,} of {counted(len(table), 'image')} show nearly the same view, first {first[0]}; "
        f"the dataset has {counted(num_views, 'view')}"
    )
    fix = (
        "keep a few of them and add other views: training learns pose, light and background with the subject"
    )
    return Outcome(False, summary, fix, rows, numbers)
