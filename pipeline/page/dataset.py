"""The dataset on the page: kept images with caption and bucket, and rejected ones with reason and fix."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import TableError
from pipeline.storage.tables import Tables, empty
from pipeline.validated_dataset.dataset_page import (
    FOLDER,
    KEPT_COLUMNS,
    THUMBNAILS,
    bucket_texts,
    thumbnail_name,
)
from pipeline.validated_dataset.holdout import times_drawn

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

PLACEMENT = (
    *("sample_id", "bucket", "resized_height", "resized_width"),
    *("crop_top", "crop_left", "target_height", "target_width"),
)
"""Columns of aspect_buckets that the page needs."""

MAX_CAPTION_CHARACTERS = 600
"""Maximum number of characters shown of a caption."""


@dataclass(frozen=True)
class Dataset:
    """The images of a recipe.

    Attributes:
        kept: One row per kept image with `uses`, and with `bucket` and `crops`, see `crop_boxes`, which are
            null before aspect_buckets has run.
        rejected: One row per rejection, sorted by reason.
    """

    recipe: Recipe
    kept: pl.DataFrame
    rejected: pl.DataFrame

    def shown(self, rows: pl.DataFrame) -> Iterator[dict[str, Any]]:
        """Return what the page shows of rows of `kept` or `rejected`."""
        folder = self.recipe.output_dir / "reports" / FOLDER / THUMBNAILS
        for row in rows.iter_rows(named=True):
            name = thumbnail_name(row) if row.get("content_hash") else ""
            thumbnail = folder / name if name else None
            # A rejected image is not drawn on request: the scan may have refused to open its file.
            if "reason" in row and thumbnail is not None and not thumbnail.is_file():
                thumbnail = None
            captions = [row.get("caption") or "", *json.loads(row.get("more_captions") or "[]")]
            # Rows of rejected images have no crops.
            crops = [tuple(map(int, box.split())) for box in row.get("crops") or ()]
            yield {**row, "thumbnail": thumbnail, "captions": shortened(captions), "crops": crops}

    def first(self, number: int) -> pl.DataFrame:
        """Return at most so many kept images, chosen by content: all of them have thumbnails."""
        return self.kept.bottom_k(number, by=["content_hash", "sample_id"]).sort("sample_id")


def read_dataset(recipe: Recipe) -> Dataset:
    """Read the images of the recipe; none if its dataset was not validated yet."""
    tables = Tables(recipe.output_dir)
    # A stage writes the page too, and must not hold a second table with all columns.
    kept = tables.read_previous("validated_dataset", (*KEPT_COLUMNS, "caption_from", "decoding"))
    if kept is None:
        return Dataset(recipe, empty("validated_dataset"), read_rejected(tables))

    kept = kept.with_columns(uses=times_drawn(kept, recipe.datasets))
    placed = tables.read_previous("aspect_buckets", PLACEMENT)
    if placed is None:
        placed = empty("aspect_buckets").select(PLACEMENT)
    for columns in (bucket_texts(placed), crop_boxes(placed)):
        kept = kept.join(columns, on="sample_id", how="left", maintain_order="left")
    return Dataset(recipe, kept, read_rejected(tables))


def crop_boxes(placed: pl.DataFrame) -> pl.DataFrame:
    """Return `crops` of each sample that a crop shortens: left, top, width and height per mille, as texts."""
    edges = {
        "left": pl.col("crop_left") / pl.col("resized_width"),
        "top": pl.col("crop_top") / pl.col("resized_height"),
        "width": pl.col("target_width") / pl.col("resized_width"),
        "height": pl.col("target_height") / pl.col("resized_height"),
    }
    boxes = placed.select(
        "sample_id", *((edge * 1000).round().cast(pl.Int32).alias(k) for k, edge in edges.items())
    )
    cropped = boxes.filter((pl.col("width") < 1000) | (pl.col("height") < 1000))
    box = pl.concat_str(*edges, separator=" ").sort()
    return cropped.group_by("sample_id").agg(crops=box)


def read_rejected(tables: Tables) -> pl.DataFrame:
    """Return the rejected images sorted by reason; none if their table is damaged."""
    try:
        return tables.read_rejected().sort("reason", "sample_id")
    except TableError:
        # Its stage writes a damaged file again.
        return empty("rejected")


def reasons(rejected: pl.DataFrame) -> Mapping[str, int]:
    """Return the number of rejected images by reason, the most frequent one first."""
    return dict(rejected.group_by("reason").len().sort(["len", "reason"], descending=[True, False]).rows())


def shortened(captions: Iterable[str]) -> list[str]:
    """Return captions of at most `MAX_CAPTION_CHARACTERS`, each followed by its length if it was longer."""
    return [
        text
        if len(text) <= MAX_CAPTION_CHARACTERS
        else f"{text[:MAX_CAPTION_CHARACTERS]}… ({len(text):,} characters)"
        for text in captions
    ]
