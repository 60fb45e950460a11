"""raw_images: which images there are, how large each is, and the hash of its content.

A file whose stat is as in the last table is not read again, as in git's index. As there, a stat is not
trusted when the file had changed so shortly before it was read that it could not tell a second change.
"""

from __future__ import annotations

import hashlib
import os
import time
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.image_formats import ImageError
from pipeline.images import DECODER, changed_error, one_image, read_header
from pipeline.ingest.captions import sidecar_path
from pipeline.ingest.folder import Found, Problem, Walk, walk
from pipeline.ingest.funnel import by_reason, printable, refusal
from pipeline.ingest.listed import walk_listing
from pipeline.ingest.parallel import in_threads
from pipeline.progress import progress
from pipeline.reports import Log, Report, StageResult, Stopwatch
from pipeline.source import LocalSource, Opened, Source, Stat, source_at, threads_for
from pipeline.tables import SCHEMAS, Tables, frame, in_order

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings, Recipe

STAGE = "raw_images"

CLOCK_GRANULARITY_NS = 2_000_000_000
"""Of the coarsest file system clock (FAT), and room for a server's clock. A file whose inode changed within
it before the scan is read again by the next one."""

MAX_NAMED = 50
"""Paths that the report lists of each kind of oddity; the counts are complete."""

_STAT = ["file_bytes", "mtime_ns", "ctime_ns", "inode"]

Row = dict[str, Any]


@dataclass(frozen=True)
class _Scanned:
    """One dataset's folder as walked, the images with their sample ids, sorted by path."""

    settings: DatasetSettings
    source: Source
    walk: Walk
    images: list[tuple[str, Found]]
    rejected: list[Row]


def scan(recipe: Recipe, tables: Tables, *, log: Log) -> StageResult:
    """Every image below the recipe's datasets, with its size, content hash and stat; nothing is written.

    The report's `in` is what may be an image; of it `kept` have a readable header. `read` of them were opened
    in this scan, `unchanged` were known from the last one.

    Raises:
        DatasetError: A dataset's folder is missing, or cannot be listed.
    """
    watch = Stopwatch()
    datasets = [_walk_dataset(settings, log) for settings in recipe.datasets]
    found = _found(datasets)
    max_px = recipe.checks.max_image_pixels
    known = _unchanged(found, tables.read_previous(STAGE), max_px)
    fresh = found.join(known, on="sample_id", how="anti")
    log(f"found {len(found):,} image files, {len(known):,} of them unchanged since the last scan")
    sources = {dataset.settings.name: dataset.source for dataset in datasets}
    files: list[tuple[Source, str, Stat]] = [
        (sources[row[0]], row[1], row[2:]) for row in fresh.select("dataset", "path", *_STAT).iter_rows()
    ]
    rows: list[Row] = []
    rejected = [row for dataset in datasets for row in dataset.rejected]
    read, threads = partial(_read, max_px=max_px), threads_for(sources.values())
    outcomes = in_threads(read, files, log=log, doing="images read", threads=threads)
    bases = fresh.select("sample_id", "dataset", "path").rows(named=True)
    for base, outcome in zip(bases, outcomes, strict=True):
        (rejected if "reason" in outcome else rows).append({**base, **outcome})
    table = in_order(pl.concat([known, frame(STAGE, rows)]) if rows else known, ["sample_id"])
    report = _report(datasets, table, rejected) | {"read": len(fresh), "unchanged": len(known)}
    report |= watch.numbers()
    return StageResult(table, frame("rejected", rejected), report)


def _walk_dataset(settings: DatasetSettings, log: Log) -> _Scanned:
    suffix = settings.captions.suffix if settings.captions.from_ == "sidecar" else None
    found = Walk()
    source = source_at(settings.root)
    with progress(lambda: len(found.images), None, f"images found in {settings.name}", log=log):
        if settings.is_listing:
            walk_listing(settings, source, found=found)
        elif isinstance(source, LocalSource):
            walk(Path(settings.path), suffix, found=found)
        else:
            from pipeline.ingest.remote import walk_remote  # fsspec, which few need

            walk_remote(source, suffix, found=found)
    # Of two Unicode forms of one name the composed is kept, so that the other's spelling is no sample's id.
    found.images.sort()
    if not all(image.path.isascii() for image in found.images):
        found.images.sort(key=lambda image: (_sample_id("", image.path), not _is_composed(image.path)))
    problems = list(found.problems)
    images: dict[str, Found] = {}
    for image in found.images:
        path = image.path
        sample_id = f"{settings.name}/{path}" if path.isascii() else _sample_id(settings.name, path)
        if not path.isascii() and not _is_text(path):
            problems.append(_undecodable_name(path))
        elif sample_id in images:
            problems.append(_same_name(path, images[sample_id].path))
        else:
            images[sample_id] = image
    rejected = [_rejected(settings.name, problem) for problem in problems]
    return _Scanned(settings, source, found, list(images.items()), rejected)


def _sample_id(dataset: str, path: str) -> str:
    return f"{dataset}/{unicodedata.normalize('NFC', path)}"


def _is_composed(path: str) -> bool:
    return unicodedata.is_normalized("NFC", path)


def _is_text(path: str) -> bool:
    """False for a name whose bytes are no UTF-8; Python keeps them as lone surrogates."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _undecodable_name(path: str) -> Problem:
    detail = f"its name is not UTF-8: {os.fsencode(path)!r}"
    return Problem(path, "name_undecodable", detail, "rename the file or its folder")


def _same_name(path: str, kept: str) -> Problem:
    detail = f"its name differs only in Unicode form from {kept!a}, which is kept (this one is {path!a})"
    return Problem(path, "name_collision", detail, "rename one of the two files")


def _rejected(dataset: str, problem: Problem) -> Row:
    """A row of the table of rejected samples, its path escaped where it is no UTF-8.

    The id is the name as spelled: one in another Unicode form would be the id of the file that is kept. An
    escaped name carries a digest, because another file may really be named as the escape reads.
    """
    path = printable(problem.path)
    if not _is_text(problem.path):
        path = f"{path} ({hashlib.sha256(os.fsencode(problem.path)).hexdigest()[:8]})"
    error = ImageError(problem.reason, problem.detail, fix=problem.fix)
    return {"sample_id": f"{dataset}/{path}", "dataset": dataset, "path": path} | refusal(error, STAGE, None)


def _found(datasets: Sequence[_Scanned]) -> pl.DataFrame:
    """The images of all datasets: sample_id, dataset, path and stat."""
    schema: dict[str, Any] = {name: SCHEMAS[STAGE][name] for name in ("sample_id", "dataset", "path", *_STAT)}
    tables = [pl.DataFrame(schema=schema)]
    for dataset in datasets:
        sample_ids = [sample_id for sample_id, _ in dataset.images]
        path, *stat, _ = zip(*(image for _, image in dataset.images), strict=True) if sample_ids else [()] * 6
        columns = {"sample_id": sample_ids, "dataset": dataset.settings.name, "path": path}
        columns |= dict(zip(_STAT, stat, strict=True))
        tables.append(pl.DataFrame(columns, schema_overrides=schema).select(*schema))
    return pl.concat(tables)


def _unchanged(found: pl.DataFrame, previous: pl.DataFrame | None, max_px: int) -> pl.DataFrame:
    """Rows of the last table that still hold: file, stat, decoder and limit as now, and not racily recent."""
    if previous is None:
        return frame(STAGE, [])
    settled = pl.col("ctime_ns") + CLOCK_GRANULARITY_NS < pl.col("scanned_ns")
    small = pl.col("height").cast(pl.Int64) * pl.col("width") <= max_px
    trusted = previous.filter(settled & small & (pl.col("decoder") == DECODER))
    return trusted.join(found, on=["sample_id", "dataset", "path", *_STAT], how="semi")


def _read(file: tuple[Source, str, Stat], *, max_px: int) -> Row:
    """What the table says of one file, or why it is rejected. The stat is of the file that was read."""
    scanned_ns = time.time_ns()
    content_hash = None
    source, path, listed = file
    where = source.where(path)
    try:
        with one_image(where), source.open(path, listed[0]) as opened:
            stat = _stat(source, opened, listed)
            content_hash = hashlib.file_digest(opened, "sha256").hexdigest()
            opened.seek(0)
            header = read_header(opened, max_px=max_px)
            if _stat(source, opened, listed) != stat:
                raise changed_error(where)
    except ImageError as err:
        return refusal(err, STAGE, content_hash)
    return {
        **stat,
        "content_hash": content_hash,
        "height": header.size.height,
        "width": header.size.width,
        "scanned_ns": scanned_ns,
        "format": header.format,
        "mode": header.mode,
        "channels": header.channels,
        "orientation": header.orientation,
        "notes": " ".join(header.notes),
        "decoder": DECODER,
    }


def _stat(source: Source, file: Opened, listed: Stat) -> dict[str, int]:
    stat = source.stat_of(file, listed)
    if stat is None:
        raise ImageError("special_file", "it is no regular file", fix="move it away")
    return dict(zip(_STAT, stat, strict=True))


def _report(datasets: Sequence[_Scanned], table: pl.DataFrame, rejected: list[Row]) -> Report:
    passed_over = sum((dataset.walk.passed_over for dataset in datasets), Counter[str]())
    suffixes = sum((dataset.walk.suffixes for dataset in datasets), Counter[str]())
    lonely = [name for dataset in datasets for name in _lonely_captions(dataset)]
    caches = [name for dataset in datasets for name in _named(dataset, dataset.walk.foreign_caches)]
    links_out = [name for dataset in datasets for name in _named(dataset, dataset.walk.links_out)]
    return {
        "samples": len(table),
        "in": sum(len(dataset.images) + len(dataset.rejected) for dataset in datasets),
        "kept": len(table),
        "rejected": len(rejected),
        "rejected_by_reason": by_reason(row["reason"] for row in rejected),
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


def _lonely_captions(dataset: _Scanned) -> list[str]:
    """Caption files that belong to no image, not even to a rejected one."""
    suffix = dataset.settings.captions.suffix
    paths = [image.path for image in dataset.walk.images]
    paths += [problem.path for problem in dataset.walk.problems]
    captioned = {sidecar_path(path, suffix) for path in paths}
    return _named(dataset, [path for path in dataset.walk.captions if path not in captioned])


def _named(dataset: _Scanned, paths: list[str]) -> list[str]:
    return sorted(f"{dataset.settings.name}/{printable(path)}" for path in paths)
