"""validated_dataset: the images that decode to the last pixel, each with its caption.

A verdict about pixels belongs to a content hash and a decoder: the same bytes are decoded once, whatever
their file is called and however often the job runs, and a repaired file has other bytes. Captions are read
each time.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.geometry import Size
from pipeline.image_formats import ImageError
from pipeline.images import DECODER, changed_error, decode, hash_bytes, one_image, read_bytes
from pipeline.ingest.captions import caption_of
from pipeline.ingest.funnel import Funnel, by_reason, refusal
from pipeline.ingest.listed import captions_by_path, focus_by_path, focus_of, listed_columns
from pipeline.ingest.parallel import in_threads
from pipeline.ingest.selection import select
from pipeline.ingest.variants import variants
from pipeline.reports import Log, Report, StageResult, Stopwatch
from pipeline.tables import Tables, frame

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

STAGE = "validated_dataset"

BIG_IMAGE_PX = 25_000_000
"""Larger images are decoded one at a time, so that memory does not grow with the number of threads."""

OF_CONTENT = frozenset(
    ["truncated", "undecodable", "not_an_image", "plugin_missing", "empty_file", "too_large"]
)
"""Reasons that hold for the bytes of a file, wherever it lies; others are looked at anew."""

_ANY_COLOUR = (255, 255, 255)

_one_big_image = threading.Lock()

Row = dict[str, Any]


@dataclass
class _Verdicts:
    """What is known of pixels, by content hash; and of single files, by sample_id.

    Attributes:
        sound: Hashes of images that decode to the size of their header.
        refused: Hash to why it does not decode.
        by_sample: Sample id to why this file could not be judged, such as `vanished`.
        decoded: Number of images that were decoded for this.
    """

    sound: set[str] = field(default_factory=set[str])
    refused: dict[str, ImageError] = field(default_factory=dict[str, ImageError])
    by_sample: dict[str, ImageError] = field(default_factory=dict[str, ImageError])
    decoded: int = 0

    def of(self, row: Row) -> ImageError | None:
        """Why the sample is rejected for its pixels; None where they are sound."""
        content_hash = row["content_hash"]
        if content_hash in self.sound:
            return self.by_sample.get(row["sample_id"])
        return self.refused.get(content_hash) or self.by_sample[row["sample_id"]]


def validate(recipe: Recipe, raw: pl.DataFrame, tables: Tables, *, log: Log) -> StageResult:
    """The rows of raw_images whose file is unchanged, decodes completely, and has a caption.

    One sample has one reason to be rejected, the first of: its file, its pixels, its caption.
    """
    watch = Stopwatch()
    listings = {settings.name: table for settings, table in listed_columns(recipe.datasets)}
    chosen, left_out = select(recipe, raw, listings, stage=STAGE)
    if len(left_out):
        log(f"{len(left_out):,} images are left out by filters and limits")
    rows = chosen.rows(named=True)
    roots = {settings.name: settings.root for settings in recipe.datasets}
    verdicts = _known(tables)
    known = len(verdicts.sound) + len(verdicts.refused)
    log(f"{len(rows):,} images, verdicts of {known:,} contents are known")
    _judge(rows, roots, verdicts, log)
    captions = {settings.name: settings.captions for settings in recipe.datasets}
    listed = {
        settings.name: captions_by_path(settings, listings[settings.name])
        for settings in recipe.datasets
        if settings.captions.from_ == "column"
    }
    focuses = {
        settings.name: focus_by_path(settings, listings[settings.name])
        for settings in recipe.datasets
        if settings.focus_columns is not None
    }

    def look(row: Row) -> Row:
        root = roots[row["dataset"]]
        try:
            _require_unchanged(f"{root}/{row['path']}", row)
            problem = verdicts.of(row)
            if problem is not None:
                raise problem
            said = listed.get(row["dataset"], {}).get(row["path"])
            caption = caption_of(captions[row["dataset"]], root, row["path"], said)
            focus_x, focus_y = focus_of(focuses.get(row["dataset"], {}), row["path"])
        except ImageError as err:
            return refusal(err, STAGE, row["content_hash"])
        first, *more = variants(captions[row["dataset"]], caption.texts)
        return {
            "caption": first,
            "more_captions": json.dumps(more, ensure_ascii=False),
            "caption_from": caption.source,
            "focus_x": focus_x,
            "focus_y": focus_y,
        }

    kept: list[Row] = []
    rejected = left_out.rows(named=True)
    # A caption is a few system calls: two threads waiting for each other's lock take twice the time of one.
    looked = in_threads(look, rows, log=log, doing="captions read", threads=1)
    for row, outcome in zip(rows, looked, strict=True):
        identity = {name: row[name] for name in ("sample_id", "dataset", "path")}
        if "reason" in outcome:
            rejected.append(identity | outcome)
        else:
            content = {name: row[name] for name in ("content_hash", "height", "width", "file_bytes")}
            kept.append(identity | content | outcome | {"decoder": DECODER})
    report = _report(raw.rows(named=True), kept, rejected, verdicts) | watch.numbers()
    for line in _funnel(tables, kept, rejected).lines():
        log(line)
    return StageResult(frame(STAGE, kept), frame("rejected", rejected), report)


def _known(tables: Tables) -> _Verdicts:
    """What earlier runs of this decoder found out. A caption that was refused had sound pixels before it."""
    previous = tables.read_previous(STAGE)
    if previous is None:
        return _Verdicts()
    same = previous.filter(pl.col("decoder") == DECODER)
    if len(previous) and not len(same):
        return _Verdicts()
    verdicts = _Verdicts(sound=set(same["content_hash"]))
    for row in tables.read_rejected(STAGE).iter_rows(named=True):
        if row["content_hash"] is None:
            continue
        if row["reason"] in OF_CONTENT and len(same):
            error = ImageError(row["reason"], row["detail"], fix=row["fix"], where=row["path"])
            verdicts.refused[row["content_hash"]] = error
        elif row["reason"].startswith("caption_") and len(same):
            verdicts.sound.add(row["content_hash"])
    return verdicts


def _judge(rows: Sequence[Row], roots: dict[str, Path], verdicts: _Verdicts, log: Log) -> None:
    """Decode one file of each content that is not known yet, and add the verdicts."""
    unknown: dict[str, list[Row]] = {}
    for row in rows:
        if row["content_hash"] not in verdicts.sound and row["content_hash"] not in verdicts.refused:
            unknown.setdefault(row["content_hash"], []).append(row)

    def judge(same: list[Row]) -> list[ImageError | None]:
        """One answer a file until one is about the content; the others then need none."""
        answers: list[ImageError | None] = []
        for row in same:
            answers.append(_decoded(roots[row["dataset"]] / row["path"], row))
            if answers[-1] is None or answers[-1].reason in OF_CONTENT:
                break
        return answers

    groups = list(unknown.values())
    for group, answers in zip(
        groups, in_threads(judge, groups, log=log, doing="images decoded"), strict=True
    ):
        verdicts.decoded += 1
        last = answers[-1]
        if last is None:
            verdicts.sound.add(group[0]["content_hash"])
        elif last.reason in OF_CONTENT:
            verdicts.refused[group[0]["content_hash"]] = last
        for row, answer in zip(group, answers, strict=False):
            if answer is not None:
                verdicts.by_sample[row["sample_id"]] = answer


def _decoded(path: Path, row: Row) -> ImageError | None:
    """Why the file is not the sound image that the scan saw; None where it is."""
    try:
        data = read_bytes(path)
        if hash_bytes(data) != row["content_hash"]:
            raise changed_error(path)
        is_big = row["height"] * row["width"] > BIG_IMAGE_PX
        with _one_big_image if is_big else nullcontext(), one_image(str(path)):
            image = decode(data, _ANY_COLOUR)
        size = Size(image.height, image.width)
        if size != (row["height"], row["width"]):
            detail = f"its header says {row['height']}x{row['width']}, its pixels are {size}"
            raise ImageError("size_disagrees", detail, where=str(path), fix="export it again, or remove it")
    except ImageError as err:
        return err
    return None


def _require_unchanged(path: str, row: Row) -> None:
    with one_image(path):
        stat = os.stat(path)  # noqa: PTH116 - a hundred thousand times, and without making a Path
    if (stat.st_size, stat.st_mtime_ns) != (row["file_bytes"], row["mtime_ns"]):
        raise changed_error(path)


def _report(rows: Sequence[Row], kept: list[Row], rejected: list[Row], verdicts: _Verdicts) -> Report:
    lengths = sorted(len(row["caption"]) for row in kept)
    return {
        "samples": len(kept),
        "in": len(rows),
        "kept": len(kept),
        "rejected": len(rejected),
        "rejected_by_reason": by_reason(rejected),
        "decoded": verdicts.decoded,
        "known": len({row["content_hash"] for row in rows}) - verdicts.decoded,
        "captions_from": dict(Counter(row["caption_from"].partition(":")[0] for row in kept)),
        "caption_characters": {"min": lengths[0], "median": lengths[len(lengths) // 2], "max": lengths[-1]}
        if lengths
        else {},
    }


def _funnel(tables: Tables, kept: list[Row], rejected: list[Row]) -> Funnel:
    """From the files found by the scan to the samples kept here."""
    of_scan = tables.read_rejected("raw_images").rows(named=True)
    reasons = by_reason([*of_scan, *rejected])
    return Funnel(found=len(kept) + sum(reasons.values()), kept=len(kept), rejected=reasons)
