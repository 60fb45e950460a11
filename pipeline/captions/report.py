"""The sheet of the captions that a model wrote: images with their captions."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from pipeline.raw_images.sources import sources_of
from pipeline.reporting.pictures import SheetImage, SheetRow, contact_sheet
from pipeline.storage.atomic import write_bytes

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl

    from pipeline.log import Log
    from pipeline.recipe import Recipe

SHEET_FILE = "sheet.jpg"

SAMPLES = "caption_samples"
"""Folder of `reports/` for the captions of `latentline caption --sample`."""

NUM_ROWS = 12
"""Maximum number of images on the sheet."""


def sheet_path(recipe: Recipe, folder: str = "captions") -> Path:
    """Return the sheet in a folder of `reports/`."""
    return recipe.output_dir / "reports" / folder / SHEET_FILE


def write_sheet(recipe: Recipe, table: pl.DataFrame, *, folder: str, log: Log) -> None:
    """Replace the sheet with images of the table, the same ones in each run; without rows there is none."""
    file = sheet_path(recipe, folder)
    if table.is_empty():
        file.unlink(missing_ok=True)
        return
    sources = sources_of(recipe)
    shown = table.sort("content_hash", "sample_id").head(NUM_ROWS)
    rows = [
        SheetRow(
            row["caption"] or "(empty)",
            [SheetImage(sources[row["dataset"]].file(row["path"]), name=posixpath.basename(row["path"]))],
        )
        for row in shown.iter_rows(named=True)
    ]
    title = f"{recipe.name}: captions of the model, {len(rows)} of {len(table):,}"
    write_bytes(file, contact_sheet(rows, title=title, log=log))
