"""The dataset on the page: kept images with caption and bucket, and rejected ones with reason and fix."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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

MAX_CAPTION_CHARACTERS = 600
"""Maximum number of characters shown of a caption."""


@dataclass(frozen=True)
class Dataset:
    """The images of a recipe.

    Attributes:
        kept: One row per kept image with `bucket`, which is null before aspect_buckets has run, and `uses`.
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
            yield {**row, "thumbnail": thumbnail, "captions": _shortened(captions)}

    def first(self, number: int) -> pl.DataFrame:
        """Return at most so many kept images, chosen by content: all of them have thumbnails."""
        return self.kept.bottom_k(number, by=["content_hash", "sample_id"]).sort("sample_id")


def read_dataset(recipe: Recipe) -> Dataset:
    """Read the images of the recipe; none if its dataset was not validated yet."""
    tables = Tables(recipe.output_dir)
    # A stage writes the page too, and must not hold a second table with all columns.
    kept = tables.read_previous("validated_dataset", (*KEPT_COLUMNS, "decoding"))
    if kept is None:
        return Dataset(recipe, empty("validated_dataset"), _rejected(tables))

    kept = kept.with_columns(uses=times_drawn(kept, recipe.datasets))
    placed = tables.read_previous("aspect_buckets", ["sample_id", "bucket"])
    if placed is None:
        return Dataset(recipe, kept.with_columns(bucket=pl.lit(None, pl.String)), _rejected(tables))
    kept = kept.join(bucket_texts(placed), on="sample_id", how="left", maintain_order="left")
    return Dataset(recipe, kept, _rejected(tables))


def _rejected(tables: Tables) -> pl.DataFrame:
    try:
        return tables.read_rejected().sort("reason", "sample_id")
    except TableError:
        # Its stage writes a damaged file again.
        return empty("rejected")


def reasons(rejected: pl.DataFrame) -> Mapping[str, int]:
    """Return the number of rejected images by reason, the most frequent one first."""
    return dict(rejected.group_by("reason").len().sort(["len", "reason"], descending=[True, False]).rows())


def _shortened(captions: list[str]) -> list[str]:
    return [
        text
        if len(text) <= MAX_CAPTION_CHARACTERS
        else f"{text[:MAX_CAPTION_CHARACTERS]}… ({len(text):,} characters)"
        for text in captions
    ]
