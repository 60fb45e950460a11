"""Draw the report of validated_dataset: kept images, rejected images, and how sizes and captions vary.

    reports/validated_dataset/kept.jpg        kept images with captions, sampled evenly over the dataset
    reports/validated_dataset/rejected.jpg    rejected images, one strip per reason; unreadable ones are grey
    reports/validated_dataset/findings.jpg    images that checks of pictures report, the worst of each kind
    reports/validated_dataset/masks.jpg       kept images with masks; the part that does not count is red
    reports/validated_dataset/references.jpg  kept images, each after its reference images
    reports/validated_dataset/spread.png      histograms of size, aspect ratio and caption length
    reports/validated_dataset/replaced.csv    captions that `captions.replace` changes, before and after
    reports/validated_dataset/tags.csv        parts of captions between commas, and how many samples have them

The pictures are only drawn again if a table has changed.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from pipeline.images.formats import ImageError
from pipeline.images.mask import show_mask
from pipeline.log import Log
from pipeline.raw_images.manifest import captions_by_path, composed, manifests_with_columns
from pipeline.raw_images.sources import side_input_sources_of, sources_of
from pipeline.reporting.pictures import SheetImage, SheetRow, charts, contact_sheet, png
from pipeline.reporting.reports import is_current, mark_current
from pipeline.side_inputs import MASKS, SIDE_INPUTS, SideInput
from pipeline.storage.atomic import write_bytes, write_text
from pipeline.storage.needed_columns import DECODING_COLUMNS
from pipeline.storage.source import Source
from pipeline.storage.tables import content_digest
from pipeline.validated_dataset.captions import EDITED, caption_of, replaced
from pipeline.validated_dataset.picture_checks import (
    KINDS,
    large_view_groups,
    picture_findings,
    shown_value,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pipeline.recipe import DatasetSettings, Recipe

FOLDER = "validated_dataset"
KEPT_FILE, REJECTED_FILE, SPREAD_FILE = "kept.jpg", "rejected.jpg", "spread.png"
FINDINGS_FILE = "findings.jpg"
REPLACED_FILE, TAGS_FILE = "replaced.csv", "tags.csv"

NUM_STRIPS = 6
"""Maximum number of reasons on the sheet of rejected images."""

NUM_KEPT_STRIPS = 4
"""Maximum number of rows on the sheet of kept images."""

NUM_PER_STRIP = 6

NUM_REFERENCE_ROWS = 8
"""Maximum number of images on the sheet of references."""

REPORT_FORMAT = "4: findings"
"""Part of the digest, so that reports of earlier versions are drawn again."""

PREVIEW_COLUMNS = ("sample_id", "before", "after")
"""Columns of the preview; `before` is the caption as its source holds it."""

UNSAFE_REASONS = {
    *("too_large", "file_too_large", "special_file", "out_of_memory", "too_much_memory", "too_many_scans"),
    "too_slow",
}
"""Reasons of rejected images that could exhaust memory if the report opened them."""


def write_dataset_report(recipe: Recipe, table: pl.DataFrame, rejected: pl.DataFrame, *, log: Log) -> Path:
    """Draw the pictures below `output_dir/reports`, unless they already show these tables.

    `rejected` holds the samples rejected by the scan and the validation.

    Returns:
        The folder of the pictures.
    """
    folder = recipe.output_dir / "reports" / FOLDER
    digest = _digest(recipe, table, rejected)

    # Drawing opens dozens of images, possibly from an address, so an unchanged report is kept.
    if is_current(folder, digest):
        return folder

    folder.mkdir(parents=True, exist_ok=True)
    pictures = (
        KEPT_FILE,
        REJECTED_FILE,
        FINDINGS_FILE,
        SPREAD_FILE,
        *(f"{each.plural}.jpg" for each in SIDE_INPUTS),
    )

    # A picture without content any more must not stay: the UI would show it as current.
    for name in (*pictures, REPLACED_FILE, TAGS_FILE):
        (folder / name).unlink(missing_ok=True)
    sources = sources_of(recipe)
    if len(table):
        write_bytes(folder / KEPT_FILE, contact_sheet(_kept_strips(table, sources), log=log))
        write_bytes(folder / SPREAD_FILE, _histograms(table))
        write_text(folder / TAGS_FILE, tag_counts(table).write_csv())
        if strips := _findings_strips(recipe, table, sources):
            write_bytes(folder / FINDINGS_FILE, contact_sheet(strips, log=log))
    for side_input in SIDE_INPUTS:
        if rows := _side_input_rows(recipe, side_input, table, sources):
            write_bytes(folder / f"{side_input.plural}.jpg", contact_sheet(rows, log=log))
    if any(each.captions.replace for each in recipe.datasets):
        write_text(folder / REPLACED_FILE, replacement_preview(recipe, table).write_csv())
    if len(rejected):
        write_bytes(folder / REJECTED_FILE, contact_sheet(_rejected_strips(rejected, sources), log=log))

    # The digest comes last, so that an interrupted report is drawn again.
    mark_current(folder, digest)
    return folder


def masked_samples(table: pl.DataFrame) -> pl.DataFrame:
    """Return the samples with a mask."""
    return table.drop_nulls("mask_hash") if "mask_hash" in table.columns else table.clear()


def tag_counts(table: pl.DataFrame) -> pl.DataFrame:
    """Return `tag` and `samples`, the number of first captions with it, the most frequent tags first.

    A tag is a part of a caption between commas. Only tags of at least two samples are listed.
    """
    tags = table.select("sample_id", tag=pl.col("caption").str.split(",")).explode("tag")
    tags = tags.with_columns(pl.col("tag").str.strip_chars()).filter(pl.col("tag") != "").unique()

    # Commas also divide sentences, but their parts are rarely repeated.
    counts = tags.group_by("tag").agg(samples=pl.len()).filter(pl.col("samples") > 1)
    return counts.sort("samples", "tag", descending=[True, False])


def replacement_preview(recipe: Recipe, table: pl.DataFrame) -> pl.DataFrame:
    """Return the captions of validated_dataset that `captions.replace` changes, with `PREVIEW_COLUMNS`.

    Prefix, postfix and trigger word are not applied; of several captions, the changed ones are shown.
    """
    datasets = [each for each in recipe.datasets if each.captions.replace]
    in_columns = [each for each in datasets if each.captions.from_ == "column"]
    texts = {
        settings.name: captions_by_path(settings, manifest)
        for settings, manifest in manifests_with_columns(in_columns, max_bytes=recipe.checks.max_file_bytes)
    }
    sources = sources_of(recipe)
    rows = [
        (sample_id, before, after)
        for settings in datasets
        for sample_id, path in _not_edited(table)
        .filter(dataset=settings.name)
        .select("sample_id", "path")
        .iter_rows()
        for before, after in _changes(
            settings, sources, path, texts.get(settings.name, {}).get(composed(path))
        )
    ]
    return pl.DataFrame(rows, schema=dict.fromkeys(PREVIEW_COLUMNS, pl.String), orient="row")


def _not_edited(table: pl.DataFrame) -> pl.DataFrame:
    return table.filter(pl.col("caption_from") != EDITED) if "caption_from" in table.columns else table


def _changes(
    settings: DatasetSettings, sources: Mapping[str, Source], path: str, texts: tuple[str, ...] | None
) -> Iterator[tuple[str, str]]:
    as_written = settings.captions.model_copy(update={"replace": ()})
    try:
        before = caption_of(as_written, sources[settings.name], path, texts).texts
    except ImageError:  # the file changed after the captions were read
        return
    for text in before:
        after = replaced(settings.captions, text)
        if after != text:
            yield text, after


def _digest(recipe: Recipe, table: pl.DataFrame, rejected: pl.DataFrame) -> str:
    side_inputs = [each.hash_column for each in SIDE_INPUTS if each.hash_column in table.columns]
    # Decoding rules change the pictures, although the files are the same.
    decoding = [name for name in DECODING_COLUMNS if name in table.columns and table[name].count()]
    kept = table.select("sample_id", "content_hash", "caption", *side_inputs, *decoding)
    rules = [(each.name, each.captions.replace) for each in recipe.datasets if each.captions.replace]
    more = f"{REPORT_FORMAT}, {rules}" if rules else REPORT_FORMAT
    found = picture_findings(recipe, table)
    return content_digest(kept, rejected.select("sample_id", "reason", "content_hash"), found, more=more)


def _evenly_spaced(table: pl.DataFrame, number: int) -> pl.DataFrame:
    """Return at most `number` rows, evenly spaced over the table."""
    number = min(number, len(table))
    return table[[index * len(table) // number for index in range(number)]] if number else table


def _kept_strips(table: pl.DataFrame, sources: Mapping[str, Source]) -> list[SheetRow]:
    samples = _evenly_spaced(table, NUM_KEPT_STRIPS * NUM_PER_STRIP)
    columns = ("dataset", "path", "height", "width", "caption")
    shown = [
        SheetImage(
            sources[dataset].file(path), (height, width), name=posixpath.basename(path), caption=caption
        )
        for dataset, path, height, width, caption in samples.select(columns).rows()
    ]
    return _in_strips(shown, f"{len(table):,} kept")


def _masked_strips(recipe: Recipe, masked: pl.DataFrame, sources: Mapping[str, Source]) -> list[SheetRow]:
    samples = _evenly_spaced(masked, NUM_KEPT_STRIPS * NUM_PER_STRIP)
    of_masks, kinds = side_input_sources_of(recipe, MASKS.recipe_key), MASKS.sources(recipe)
    shown = [
        SheetImage(
            sources[row["dataset"]].file(row["path"]),
            (row["height"], row["width"]),
            name=posixpath.basename(row["path"]),
            caption=f"mean weight {row['mask_mean']:.2f}",
            change=partial(
                show_mask,
                mask=of_masks[row["dataset"]][0].file(row["mask_path"]),
                source=kinds[row["dataset"]],
            ),
        )
        for row in samples.iter_rows(named=True)
    ]
    return _in_strips(shown, f"{len(masked):,} masks; red does not count")


def _side_input_rows(
    recipe: Recipe, side_input: SideInput, table: pl.DataFrame, sources: Mapping[str, Source]
) -> list[SheetRow]:
    """Return one row per image: its files in order, then the image; empty without such files.

    A mask is shown in its image instead.
    """
    if side_input is MASKS:
        masked = masked_samples(table)
        return _masked_strips(recipe, masked, sources) if len(masked) else []
    images_column = side_input.hash_column
    if images_column not in table.columns:
        return []

    of_files = side_input_sources_of(recipe, side_input.recipe_key)
    samples = _evenly_spaced(table.drop_nulls(images_column), NUM_REFERENCE_ROWS)

    rows: list[SheetRow] = []
    for row in samples.iter_rows(named=True):
        images = zip(of_files[row["dataset"]], json.loads(row[images_column]), strict=True)
        shown = [
            SheetImage(
                source.file(image["path"]),
                (image["height"], image["width"]),
                name=posixpath.basename(image["path"]),
                caption=f"{side_input.name} {number}",
            )
            for number, (source, image) in enumerate(images)
        ]
        target = SheetImage(
            sources[row["dataset"]].file(row["path"]),
            (row["height"], row["width"]),
            name=posixpath.basename(row["path"]),
            caption=row["caption"],
        )
        rows.append(SheetRow("" if rows else f"{side_input.plural}, then image", [*shown, target]))
    return rows


def _in_strips(shown: Sequence[SheetImage], label: str) -> list[SheetRow]:
    """Return rows of `NUM_PER_STRIP` images; the first one has the label."""
    starts = range(0, len(shown), NUM_PER_STRIP)
    return [SheetRow("" if start else label, shown[start : start + NUM_PER_STRIP]) for start in starts]


def _rejected_strips(rejected: pl.DataFrame, sources: Mapping[str, Source]) -> list[SheetRow]:
    """Return one strip for each of the most frequent reasons."""
    strips: list[SheetRow] = []
    # The most frequent reasons first, since a sheet has space for a few only.
    counts = rejected.group_by("reason").len().sort("len", "reason", descending=[True, False])
    for reason, count in counts.head(NUM_STRIPS).rows():
        samples = _evenly_spaced(rejected.filter(pl.col("reason") == reason), NUM_PER_STRIP)

        # Files that the scan did not read stay closed: they may be pipes, or links that lead out.
        shown = [
            SheetImage(
                sources[dataset].file(path) if content_hash and reason not in UNSAFE_REASONS else None,
                name=posixpath.basename(path),
            )
            for dataset, path, content_hash in samples.select("dataset", "path", "content_hash").rows()
        ]
        strips.append(SheetRow(f"{count:,} {reason}", shown))
    return strips


def _findings_strips(recipe: Recipe, table: pl.DataFrame, sources: Mapping[str, Source]) -> list[SheetRow]:
    """Return one strip for each kind of finding and for each view that too many images show."""
    found = picture_findings(recipe, table)
    samples = table.select("sample_id", "dataset", "path", "height", "width")
    strips: list[SheetRow] = []
    for index, kind in enumerate(KINDS):
        of_kind = found.filter(pl.col("kind") == index)
        worst = of_kind.head(NUM_PER_STRIP).join(samples, on="sample_id", maintain_order="left")
        if len(worst):
            values = [shown_value(kind, value) for value in worst["value"]]
            strips.append(SheetRow(f"{len(of_kind):,} {kind.what}", _shown(worst, values, sources)))
    for sample_ids in large_view_groups(table)["sample_id"]:
        views = samples.filter(pl.col("sample_id").is_in(sample_ids.to_list()))
        first = _evenly_spaced(views, NUM_PER_STRIP)
        label = f"{len(views):,} with nearly one view"
        strips.append(SheetRow(label, _shown(first, [""] * len(first), sources)))
    return strips


def _shown(samples: pl.DataFrame, texts: Sequence[str], sources: Mapping[str, Source]) -> list[SheetImage]:
    rows = samples.select("dataset", "path", "height", "width").rows()
    return [
        SheetImage(sources[dataset].file(path), (height, width), name=posixpath.basename(path), caption=text)
        for (dataset, path, height, width), text in zip(rows, texts, strict=True)
    ]


def _histograms(table: pl.DataFrame) -> bytes:
    figure, all_axes = charts(3, 840, 260)
    values = {
        "megapixels": table["height"].cast(pl.Float64) * table["width"] / 1e6,
        "width / height": table["width"] / table["height"],
        "words per caption": table["caption"].str.count_matches(r"\S+"),
    }
    for axes, (label, column) in zip(all_axes, values.items(), strict=True):
        axes.set_xlabel(label)
        if column.n_unique() > 1:
            axes.hist(column.to_numpy(), bins=40, color="tab:blue")
            axes.set_ylabel("images")
        else:
            _write_only_value(axes, float(column[0]))
    return png(figure)


def _write_only_value(axes: Axes, value: float) -> None:
    """Write the value that all images share, because a histogram of one value is one bar without a scale."""
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, f"all images: {value:.4g}", ha="center", va="center", transform=axes.transAxes)
