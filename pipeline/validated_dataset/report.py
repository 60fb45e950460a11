"""What validated_dataset looks like: images that are kept, images that are not, and how they are spread.

    reports/validated_dataset/kept.jpg          some of the kept images, evenly over the dataset
    reports/validated_dataset/rejected.jpg      some of the others, a strip a reason; unreadable ones are grey
    reports/validated_dataset/spread.png        histograms of size, aspect ratio and caption length

They are made anew only when a table has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from pipeline.reporting.pictures import SheetImage, SheetRow, charts, contact_sheet, png
from pipeline.reporting.reports import Log
from pipeline.storage.atomic import write_bytes, write_text
from pipeline.storage.source import Source, source_at
from pipeline.storage.tables import content_digest

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

FOLDER = "validated_dataset"
KEPT_FILE, REJECTED_FILE, SPREAD_FILE = "kept.jpg", "rejected.jpg", "spread.png"
_MADE_FOR = "made_for.txt"

NUM_STRIPS = 6
NUM_IN_STRIP = 8


def write_dataset_report(recipe: Recipe, table: pl.DataFrame, rejected: pl.DataFrame, *, log: Log) -> Path:
    """Draw the pictures below `output_dir/reports`, unless they are of these tables.

    Args:
        recipe: Says where the images are.
        table: validated_dataset.
        rejected: What the scan and the validation rejected.
        log: Told how far it is.

    Returns:
        The folder.
    """
    folder = recipe.output_dir / "reports" / FOLDER
    made_for = folder / _MADE_FOR
    digest = _digest(table, rejected)
    if made_for.is_file() and made_for.read_text(encoding="utf-8") == digest:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in (KEPT_FILE, REJECTED_FILE, SPREAD_FILE):
        (folder / name).unlink(missing_ok=True)
    sources = {settings.name: source_at(settings.root) for settings in recipe.datasets}
    if len(table):
        some = _spread(table, NUM_STRIPS * NUM_IN_STRIP)
        shown = [
            SheetImage(sources[dataset].file(path), (height, width))
            for dataset, path, height, width in some.select("dataset", "path", "height", "width").rows()
        ]
        write_bytes(folder / KEPT_FILE, contact_sheet(_strips(f"{len(table):,} kept", shown), log=log))
        write_bytes(folder / SPREAD_FILE, _histograms(table))
    if len(rejected):
        write_bytes(folder / REJECTED_FILE, contact_sheet(_by_reason(rejected, sources), log=log))
    write_text(made_for, digest)
    return folder


def _digest(table: pl.DataFrame, rejected: pl.DataFrame) -> str:
    kept = table.select("sample_id", "content_hash", "caption")
    return content_digest(kept, rejected.select("sample_id", "reason", "content_hash"))


def _spread(table: pl.DataFrame, number: int) -> pl.DataFrame:
    """At most `number` rows, evenly over the table, the same ones each time."""
    number = min(number, len(table))
    return table[[index * len(table) // number for index in range(number)]] if number else table


def _strips(label: str, shown: Sequence[SheetImage]) -> list[SheetRow]:
    lines = [shown[start : start + NUM_IN_STRIP] for start in range(0, len(shown), NUM_IN_STRIP)]
    return [SheetRow("" if index else label, line) for index, line in enumerate(lines)]


def _by_reason(rejected: pl.DataFrame, sources: Mapping[str, Source]) -> list[SheetRow]:
    """A strip for each of the most frequent reasons."""
    strips: list[SheetRow] = []
    counts = rejected.group_by("reason").len().sort("len", "reason", descending=[True, False])
    for reason, count in counts.head(NUM_STRIPS).rows():
        some = _spread(rejected.filter(pl.col("reason") == reason), NUM_IN_STRIP)
        # What the scan did not read is not opened here: a pipe, a link that leads out, a file without rights;
        # nor what would fill the memory.
        is_safe = reason not in {"too_large", "out_of_memory"}
        shown = [
            SheetImage(sources[dataset].file(path) if content_hash and is_safe else None)
            for dataset, path, content_hash in some.select("dataset", "path", "content_hash").rows()
        ]
        strips.append(SheetRow(f"{count:,} {reason}", shown))
    return strips


def _histograms(table: pl.DataFrame) -> bytes:
    figure, (sizes, ratios, captions) = charts(3, 840, 260)
    edges = table.select(
        megapixels=pl.col("height").cast(pl.Float64) * pl.col("width") / 1e6,
        ratio=pl.col("width") / pl.col("height"),
        words=pl.col("caption").str.count_matches(r"\S+"),
    )
    for axes, name, label in (
        (sizes, "megapixels", "megapixels"),
        (ratios, "ratio", "width / height"),
        (captions, "words", "words of a caption"),
    ):
        axes.hist(edges[name].to_numpy(), bins=40, color="tab:blue")
        axes.set(xlabel=label, ylabel="images")
    return png(figure)
