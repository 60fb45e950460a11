"""raw_images: which images there are, how large each is, and the hash of its content.

A file whose stat is as in the last table is not read again, as in git's index; nor is one that was rejected
for what it holds. As there, a stat is not trusted when the file had changed so shortly before it was read
that it could not tell a second change.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.images.decode import changed_error, decoder_of, decoders, one_image, read_header
from pipeline.images.formats import ImageError, sniff
from pipeline.raw_images.funnel import by_reason, printable, refusal
from pipeline.raw_images.gathered import Gathered, Rows
from pipeline.raw_images.parallel import in_threads
from pipeline.raw_images.scan_index import REFUSED, made_by, read_refused, write_refused
from pipeline.raw_images.walk import STAT, Walked, walk_dataset
from pipeline.reporting.reports import Log, Report, StageResult, Stopwatch
from pipeline.storage.source import Opened, Source, Stat, threads_for
from pipeline.storage.tables import REJECTED, SCHEMAS, Tables, empty, in_order, only, validated, without

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings, Recipe

STAGE = "raw_images"

CLOCK_GRANULARITY_NS = 2_000_000_000
"""Of the coarsest file system clock (FAT), and room for a server's clock. A file whose inode changed within
it before the scan is read again by the next one."""

MAX_NAMED = 50
"""Paths that the report lists of each kind of oddity; the counts are complete."""


REMEMBERED = ("truncated", "undecodable", "not_an_image", "empty_file", "too_large")
"""Reasons that hold for a file as long as its stat does; others are looked at anew, such as a missing
plug-in or a file that could not be opened."""

Row = dict[str, Any]


def scan(recipe: Recipe, tables: Tables, *, log: Log, remember: bool = True) -> StageResult:
    """Every image below the recipe's datasets, with its size, content hash and stat.

    The report's `in` is what may be an image; of it `kept` have a readable header. `read` of them were opened
    in this scan; `unchanged` were known from the last one, and `rejected_unchanged` as what they are rejected
    for.

    Args:
        recipe: Its `datasets`.
        tables: Where what earlier scans found out is kept.
        log: Told how far it is.
        remember: Whether what is found out of rejected files is kept for the next scan.

    Raises:
        DatasetError: A dataset's folder is missing, or cannot be listed.
    """
    watch = Stopwatch()
    datasets = [walk_dataset(settings, log) for settings in recipe.datasets]
    found = pl.concat([dataset.images for dataset in datasets])
    max_px = recipe.checks.max_image_pixels
    known = _unchanged(found, tables.read_previous(STAGE), max_px)
    bad = _same_files(found, read_refused(tables).filter(pl.col("max_px") == max_px))
    fresh = without(without(found, known), bad)
    log(
        f"found {len(found):,} image files, {len(found) - len(fresh):,} of them unchanged since the last scan"
    )
    rows, refused = _read_all({each.settings.name: each.source for each in datasets}, fresh, max_px, log)
    if remember:
        write_refused(tables, pl.concat([bad, refused.filter(pl.col("reason").is_in(REMEMBERED))]))
    table = in_order(pl.concat([known, rows]), ["sample_id"]) if len(rows) else known
    unlooked = pl.DataFrame([row for each in datasets for row in each.rejected], schema=REJECTED)
    rejected = pl.concat([unlooked, bad.select(REJECTED.keys()), refused.select(REJECTED.keys())])
    report = _report(datasets, table, rejected)
    report |= {"read": len(fresh), "unchanged": len(known), "rejected_unchanged": len(bad)}
    report |= watch.numbers()
    rejected = validated("rejected", rejected.sort("sample_id"), "what the scan rejected")
    return StageResult(validated(STAGE, table, "what the scan found"), rejected, report)


def _unchanged(found: pl.DataFrame, previous: pl.DataFrame | None, max_px: int) -> pl.DataFrame:
    """Rows of the last table that still hold: file, stat, decoder and limit as now, and not racily recent."""
    if previous is None:
        return empty(STAGE)
    same = _same_files(found, previous)
    return only(same, same["height"].cast(pl.Int64) * same["width"] <= max_px)


def _same_files(found: pl.DataFrame, known: pl.DataFrame) -> pl.DataFrame:
    """The rows of what is known whose file is as it was, and was settled; the frame itself where all are."""
    if known.is_empty():
        return known
    now = found.select("sample_id", *(pl.col(name).alias(f"now_{name}") for name in ("path", *STAT)))
    if not known["sample_id"].equals(now["sample_id"]):
        now = known.select("sample_id").join(now, on="sample_id", how="left", maintain_order="left")
    settled = known["ctime_ns"] + CLOCK_GRANULARITY_NS < known["scanned_ns"]
    holds = settled & made_by(known["decoder"], decoders())
    for name in ("path", *STAT):
        holds &= (known[name] == now[f"now_{name}"]).fill_null(value=False)
    return only(known, holds)


def _read_all(
    sources: Mapping[str, Source], fresh: pl.DataFrame, max_px: int, log: Log
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """What is in the files: rows of raw_images, and rows as `known.REFUSED`."""
    rows, refused = Gathered(SCHEMAS[STAGE]), Gathered(REFUSED)
    files = Rows(fresh.select("dataset", "path", *STAT))
    bases = fresh.select("sample_id", "dataset", "path").iter_rows(named=True)

    def read(row: tuple[Any, ...]) -> Row:
        return _read(sources[row[0]], row[1], row[2:], max_px=max_px)

    threads = threads_for(sources.values())
    for base, outcome in zip(
        bases, in_threads(read, files, log=log, doing="images read", threads=threads), strict=True
    ):
        refusing = "reason" in outcome
        (refused if refusing else rows).add({**base, **outcome, "max_px": max_px})
    return rows.frame(), refused.frame()


def _read(source: Source, path: str, listed: Stat, *, max_px: int) -> Row:
    """What the table says of one file, or why it is rejected. The stat is of the file that was read."""
    said: Row = {"scanned_ns": time.time_ns()}
    where = source.where(path)
    try:
        with one_image(where), source.open(path, listed[0]) as opened:
            stat = _stat(source, opened, listed)
            content_hash = hashlib.file_digest(opened, "sha256").hexdigest()
            said |= {**stat, "content_hash": content_hash}
            opened.seek(0)
            said["decoder"] = decoder_of(sniff(opened.read(64)))
            opened.seek(0)
            header = read_header(opened, max_px=max_px)
            if _stat(source, opened, listed) != stat:
                raise changed_error(where)
    except ImageError as err:
        return said | refusal(err, STAGE, said.get("content_hash"))
    return said | {
        "height": header.size.height,
        "width": header.size.width,
        "format": header.format,
        "mode": header.mode,
        "channels": header.channels,
        "orientation": header.orientation,
        "notes": " ".join(header.notes),
    }


def _stat(source: Source, file: Opened, listed: Stat) -> dict[str, int]:
    stat = source.stat_open(file, listed)
    if stat is None:
        raise ImageError("special_file", "it is no regular file", fix="move it away")
    return dict(zip(STAT, stat, strict=True))


def _report(datasets: Sequence[Walked], table: pl.DataFrame, rejected: pl.DataFrame) -> Report:
    passed_over = sum((dataset.walk.passed_over for dataset in datasets), Counter[str]())
    suffixes = sum((dataset.walk.suffixes for dataset in datasets), Counter[str]())
    lonely = [name for each in datasets for name in _shown(each.settings, each.lonely)]
    caches = [name for each in datasets for name in _shown(each.settings, each.walk.foreign_caches)]
    links_out = [name for each in datasets for name in _shown(each.settings, each.walk.links_out)]
    return {
        "samples": len(table),
        "in": sum(len(dataset.images) + len(dataset.rejected) for dataset in datasets),
        "kept": len(table),
        "rejected": len(rejected),
        "rejected_by_reason": by_reason(rejected["reason"]),
        "passed_over": dict(sorted(passed_over.items())),
        "suffixes_of_no_images": dict(suffixes.most_common(MAX_NAMED)),
        "datasets": {
            dataset.settings.name: {
                "path": str(dataset.settings.path),
                "in": len(dataset.images) + len(dataset.rejected),
                "suffixes_of_no_images": dict(dataset.walk.suffixes.most_common(MAX_NAMED)),
                "passed_over": dict(sorted(dataset.walk.passed_over.items())),
            }
            for dataset in datasets
        },
        "captions_without_image": len(lonely),
        "foreign_caches": len(caches),
        "links_out": len(links_out),
        "named": {
            "captions_without_image": lonely[:MAX_NAMED],
            "foreign_caches": caches[:MAX_NAMED],
            "links_out": links_out[:MAX_NAMED],
        },
    }


def _shown(settings: DatasetSettings, paths: list[str]) -> list[str]:
    return sorted(f"{settings.name}/{printable(path)}" for path in paths)
