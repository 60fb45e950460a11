"""Stage raw_images: list the datasets' image files and read the size and content hash of each."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.escaping import without_secrets
from pipeline.images.decode import (
    decoder_version,
    is_current_decoder,
    read_header,
)
from pipeline.images.decoder_warnings import counted_warnings
from pipeline.images.failures import changed_error, image_errors
from pipeline.images.formats import ImageError, sniff
from pipeline.log import Log
from pipeline.raw_images.commits import COMMITS, current_commits, with_commits
from pipeline.raw_images.parallel import in_threads
from pipeline.raw_images.scan_index import REJECTED_FILES, STAT, read_rejected_files, write_rejected_files
from pipeline.raw_images.shards import unpack_shards
from pipeline.raw_images.walk import WalkedDataset, walk_dataset
from pipeline.reporting.rejections import count_by_reason, printable, rejection
from pipeline.reporting.reports import Report, StageResult, Stopwatch
from pipeline.storage.atomic import OLD_S, remove_temp_files
from pipeline.storage.source import Opened, Source, Stat, threads_for
from pipeline.storage.tables import REJECTED, SCHEMAS, Tables, empty, usable_and_rejected, validated

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings, Recipe

STAGE = "raw_images"

CLOCK_GRANULARITY_NS = 2_000_000_000
"""Granularity of the coarsest file system clock (FAT), with room for a server's clock. A file that changed
within this time before the scan is read again by the next scan."""

MAX_NAMED = 50
"""Maximum number of paths that the report lists for each kind of oddity; the counts are complete."""

# Files with other reasons, such as a missing plug-in or a failed read, are tried again by every scan.
CONTENT_REASONS = ("truncated", "undecodable", "not_an_image", "empty_file", "too_large")
"""Rejection reasons that hold as long as the file's stat is unchanged."""

Row = dict[str, Any]


def scan(recipe: Recipe, tables: Tables, *, log: Log, remember: bool = True) -> StageResult:
    """List every image of the recipe's datasets with its size, content hash and stat.

    In the report, `in` counts the files that may be images, and `kept` those with a readable header. `read`
    files were opened by this scan; `unchanged` and `rejected_unchanged` files were not.

    With `remember`, rejected files are stored for the next scan, and old temporary files are removed.

    Raises:
        DatasetError: A dataset's folder is missing or cannot be listed, or a shard cannot be unpacked.
        StoreError: The disk has too little space for the images in shards.
    """
    stopwatch = Stopwatch()
    unpack_shards(recipe, log=log)
    commits = current_commits(recipe)
    recipe = with_commits(recipe, commits)
    max_file_bytes = recipe.checks.max_file_bytes
    datasets = [walk_dataset(settings, log, max_file_bytes=max_file_bytes) for settings in recipe.datasets]
    files = pl.concat([dataset.images for dataset in datasets])

    max_px = recipe.checks.max_image_pixels
    unchanged = _unchanged_images(files, tables.read_previous(STAGE), max_px, max_file_bytes)
    still_rejected = _settled(files, read_rejected_files(tables).filter(pl.col("max_px") == max_px))
    new_files = files.join(
        pl.concat([unchanged.select("sample_id"), still_rejected.select("sample_id")]),
        on="sample_id",
        how="anti",
    )
    log(f"{len(files):,} image files, {len(files) - len(new_files):,} of them unchanged since the last scan")

    sources = {dataset.settings.name: dataset.source for dataset in datasets}
    images, rejected_files = _read_images(sources, new_files, max_px, log)
    if remember:
        for folder in (tables.folder, recipe.output_dir / "reports"):
            remove_temp_files(folder, min_age_s=OLD_S)
        new_rejected = rejected_files.filter(pl.col("reason").is_in(CONTENT_REASONS))
        write_rejected_files(tables, pl.concat([still_rejected, new_rejected]))

    table = pl.concat([unchanged, images]).sort("sample_id")
    unreadable = pl.DataFrame([row for dataset in datasets for row in dataset.rejected], schema=REJECTED)
    rejected = pl.concat(
        [unreadable, still_rejected.select(*REJECTED), rejected_files.select(*REJECTED)]
    ).sort("sample_id")
    report = {
        **_report(recipe, datasets, table, rejected),
        "read": len(new_files),
        "unchanged": len(unchanged),
        "rejected_unchanged": len(still_rejected),
        COMMITS: commits,
        **stopwatch.numbers(),
    }
    return StageResult(
        validated(STAGE, table, "images of this scan"),
        validated("rejected", rejected, "rejected files of this scan"),
        report,
    )


def _unchanged_images(
    files: pl.DataFrame, previous: pl.DataFrame | None, max_px: int, max_file_bytes: int
) -> pl.DataFrame:
    if previous is None:
        return empty(STAGE)

    # The limits of the recipe may be lower than they were.
    within_limit = pl.col("height").cast(pl.Int64) * pl.col("width") <= max_px
    return _settled(files, previous.filter(within_limit, pl.col("file_bytes") <= max_file_bytes))


def _settled(files: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of an earlier scan for unchanged files that had settled when they were read."""
    # As in git's index, a stat is not trusted if the file changed so shortly before it was read that a second
    # change could have left the same stat.
    settled = pl.col("ctime_ns") + CLOCK_GRANULARITY_NS < pl.col("scanned_ns")
    current_decoders = [each for each in rows["decoder"].drop_nulls().unique() if is_current_decoder(each)]
    same_decoder = pl.col("decoder").is_in(current_decoders)

    # Ids are distinct, and comparing columns takes half the time of a join by all of them.
    listed = rows.select("sample_id").join(files, on="sample_id", how="left", maintain_order="left")
    same_file = [pl.col(name) == listed[name] for name in ("path", *STAT)]
    return rows.filter(settled, same_decoder, *same_file)


def _read_images(
    sources: Mapping[str, Source], files: pl.DataFrame, max_px: int, log: Log
) -> tuple[pl.DataFrame, pl.DataFrame]:
    def read(file: Row) -> Row:
        return {**file, **_read_image(sources[file["dataset"]], file, max_px=max_px), "max_px": max_px}

    threads = threads_for(sources.values())
    with counted_warnings(log):
        rows = in_threads(read, files.rows(named=True), log=log, doing="images read", threads=threads)
        return usable_and_rejected(rows, SCHEMAS[STAGE], REJECTED_FILES)


def _read_image(source: Source, file: Row, *, max_px: int) -> Row:
    """Return the columns of one image, or of its rejection."""
    # The time before the read, because the file may change while it is read.
    row: Row = {"scanned_ns": time.time_ns(), **dict.fromkeys(STAT)}
    path = file["path"]
    listed: Stat = (file["file_bytes"], file["mtime_ns"], file["ctime_ns"], file["inode"])
    where = source.where(path)
    try:
        with image_errors(where), source.open(path, listed[0]) as opened:
            # The stat of the opened file, because another file may have its name since the listing.
            stat = _stat(source, opened, listed)
            content_hash = hashlib.file_digest(opened, "sha256").hexdigest()
            row |= {**stat, "content_hash": content_hash}
            opened.seek(0)

            # Before the header: a rejection also holds only for this version of the decoder.
            row["decoder"] = decoder_version(sniff(opened.read(64)))
            opened.seek(0)
            header = read_header(opened, max_px=max_px)

            # Without this, the hash and the header could belong to different contents.
            if _stat(source, opened, listed) != stat:
                raise changed_error(where)
    except ImageError as err:
        return row | rejection(err, STAGE, row.get("content_hash"))
    return row | {
        "height": header.size.height,
        "width": header.size.width,
        "format": header.format,
        "mode": header.mode,
        "channels": header.channels,
        "orientation": header.orientation,
        "notes": " ".join(header.notes),
    }


def _stat(source: Source, file: Opened, listed: Stat) -> dict[str, int]:
    return dict(zip(STAT, source.stat_open(file, listed), strict=True))


def _report(
    recipe: Recipe, datasets: Sequence[WalkedDataset], table: pl.DataFrame, rejected: pl.DataFrame
) -> Report:
    oddities = {
        "captions_without_image": _names((each.settings, each.orphan_captions) for each in datasets),
        "foreign_caches": _names((each.settings, each.walk.foreign_caches) for each in datasets),
        "links_out": _names((each.settings, each.walk.links_out) for each in datasets),
        "deleted_or_cached": _names((each.settings, each.walk.deleted_or_cached) for each in datasets),
    }
    passed_over = sum((dataset.walk.passed_over for dataset in datasets), Counter[str]())
    suffixes = sum((dataset.walk.suffixes for dataset in datasets), Counter[str]())

    # Programs read these keys; docs/outputs.md describes the file.
    return {
        "samples": len(table),
        "in": sum(_num_found(dataset) for dataset in datasets),
        "kept": len(table),
        "rejected": len(rejected),
        "rejected_by_reason": count_by_reason(rejected["reason"]),
        "passed_over": dict(sorted(passed_over.items())),
        "suffixes_of_no_images": dict(suffixes.most_common(MAX_NAMED)),
        "datasets": {
            dataset.settings.name: {
                "path": without_secrets(str(recipe.written_path(dataset.settings))),
                "in": _num_found(dataset),
                "suffixes_of_no_images": dict(dataset.walk.suffixes.most_common(MAX_NAMED)),
                "passed_over": dict(sorted(dataset.walk.passed_over.items())),
            }
            for dataset in datasets
        },
        **{kind: len(names) for kind, names in oddities.items()},
        "named": {kind: names[:MAX_NAMED] for kind, names in oddities.items()},
    }


def _num_found(dataset: WalkedDataset) -> int:
    return len(dataset.images) + len(dataset.rejected)


def _names(paths: Iterable[tuple[DatasetSettings, list[str]]]) -> list[str]:
    """Return printable paths with their dataset's name in front, sorted within each dataset."""
    return [
        name
        for settings, in_dataset in paths
        for name in sorted(f"{settings.name}/{printable(path)}" for path in in_dataset)
    ]
