"""The sheet of a diagnosis: images that do not fit their captions, next to images of better captions."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from pipeline.raw_images.sources import sources_of
from pipeline.reporting.pictures import SheetImage, SheetRow, contact_sheet
from pipeline.storage.atomic import write_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    import polars as pl

    from pipeline.log import Log
    from pipeline.recipe import Recipe
    from pipeline.storage.source import Source

SHEET_FILE = "worst.jpg"

NUM_ROWS = 12
"""Maximum number of captions on the sheet."""


def write_sheet(recipe: Recipe, worst: pl.DataFrame, table: pl.DataFrame, *, log: Log) -> None:
    """Replace `reports/diagnosis/worst.jpg`; without a caption that does not fit, there is no sheet.

    Args:
        recipe: The recipe.
        worst: Rows of the table that do not fit, the worst first.
        table: All rows of the table.
        log: Receives the progress.
    """
    file = recipe.output_dir / "reports" / "diagnosis" / SHEET_FILE
    if worst.is_empty():
        file.unlink(missing_ok=True)
        return
    sources = sources_of(recipe)
    owners = {row["caption"]: row for row in table.iter_rows(named=True)}
    rows: list[SheetRow] = []
    for row in worst.head(NUM_ROWS).iter_rows(named=True):
        images = [_image(row, sources)]
        # A caption with an exchanged word may be the caption of no image.
        if owner := owners.get(row["better_caption"]):
            images.append(_image(owner, sources))
        rows.append(SheetRow(f"score {row['score']:+.3f}; fits better: {row['better_caption']}", images))
    title = f"{recipe.name}: captions that do not fit, {len(rows)} of {len(worst):,}"
    write_bytes(file, contact_sheet(rows, title=title, log=log))


def _image(row: Mapping[str, str], sources: Mapping[str, Source]) -> SheetImage:
    name = posixpath.basename(row["path"])
    return SheetImage(sources[row["dataset"]].file(row["path"]), name=name, caption=row["caption"])
