"""Verdicts about pixels: what decodes to its last pixel and what it looks like, or why it does not decode.

A verdict belongs to a content hash and a decoder: the same bytes are decoded once, whatever their file is
called and however often the job runs, and a repaired file has other bytes.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl

from pipeline.images.decode import (
    File,
    changed_error,
    decode,
    decoder_of,
    decoders,
    hash_bytes,
    one_image,
    read_bytes,
)
from pipeline.images.formats import ImageError, sniff
from pipeline.images.geometry import Size
from pipeline.raw_images.funnel import refusal
from pipeline.raw_images.gathered import Gathered, Rows, rows_at
from pipeline.raw_images.parallel import in_threads
from pipeline.raw_images.scan_index import PIXELS
from pipeline.reporting.reports import Log
from pipeline.storage.columns import is_first, put_beside
from pipeline.storage.source import Source, threads_for
from pipeline.storage.tables import only
from pipeline.validated_dataset.duplicates import perceptual_hash
from pipeline.versions import LOOK_VERSION

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

_STAGE = "validated_dataset"

BIG_IMAGE_PX = 25_000_000
"""Larger images are decoded one at a time, so that memory does not grow with the number of threads."""

OF_CONTENT = frozenset(["truncated", "undecodable", "not_an_image", "empty_file"])
"""Reasons that hold for the bytes of a file, wherever it lies; others are looked at anew, such as
`out_of_memory`."""

_ANY_COLOUR = (255, 255, 255)

_one_big_image = threading.Lock()

_JUDGED = ["sample_id", "dataset", "path", "content_hash", "height", "width"]

_SAID = {name: PIXELS[name] for name in ("reason", "detail", "fix", "perceptual_hash")}

Row = dict[str, Any]


@dataclass
class Verdicts:
    """What is known of pixels, by content hash; and of single files, by sample_id.

    Attributes:
        table: As `known.PIXELS`: of every content that was judged, now or earlier.
        refused: Hash to why it does not decode.
        by_sample: Sample id to why this file could not be judged, such as `vanished`.
        decoded: Number of contents that were decoded for this.
    """

    table: pl.DataFrame
    refused: dict[str, ImageError] = field(default_factory=dict[str, ImageError])
    by_sample: dict[str, ImageError] = field(default_factory=dict[str, ImageError])
    decoded: int = 0

    def of(self, row: Row) -> ImageError | None:
        """Why the sample is rejected for its pixels; None where they are sound."""
        return self.by_sample.get(row["sample_id"]) or self.refused.get(row["content_hash"])


def judge(
    recipe: Recipe, sources: Mapping[str, Source], rows: pl.DataFrame, known: pl.DataFrame, *, log: Log
) -> Verdicts:
    """What is known of each content; one file of those of which nothing is known is decoded."""
    verdicts = Verdicts(known)
    max_px = recipe.checks.max_image_pixels
    is_known = rows["content_hash"].is_in(known["content_hash"].implode())
    unknown = rows.select(_JUDGED).filter(~is_known)
    first = is_first(unknown["content_hash"])
    more: dict[str, list[Row]] = {}
    for row in unknown.filter(~first).iter_rows(named=True):
        more.setdefault(row["content_hash"], []).append(row)

    def of_content(first: Sequence[Any]) -> list[Row]:
        row = dict(zip(_JUDGED, first, strict=True))
        return [row, *more.get(row["content_hash"], ())]

    def answers_of(first: tuple[Any, ...]) -> list[_Decoded]:
        """One answer a file until one is about the content; the others then need none."""
        answers: list[_Decoded] = []
        for row in of_content(first):
            answers.append(_decoded(sources[row["dataset"]].file(row["path"]), row, max_px))
            error = answers[-1].error
            if error is None or error.reason in OF_CONTENT:
                break
        return answers

    contents = only(unknown, first)
    fresh, places = Gathered(_SAID), array("q")
    named, judge_of = dict[str, int](), array("B")
    threads = threads_for(sources.values())
    decoded = in_threads(answers_of, Rows(contents), log=log, doing="images decoded", threads=threads)
    for place, answers in enumerate(decoded):
        group = of_content(contents.row(place))
        verdicts.decoded += 1
        last = answers[-1]
        if last.error is None or last.error.reason in OF_CONTENT:
            said: Row = {} if last.error is None else refusal(last.error, _STAGE, None)
            fresh.add({**said, "perceptual_hash": last.perceptual_hash})
            places.append(place)
            judge_of.append(named.setdefault(last.judge, len(named)))
        for row, answer in zip(group, answers, strict=False):
            if answer.error is not None:
                verdicts.by_sample[row["sample_id"]] = answer.error
    by = pl.Series("decoder", list(named), dtype=pl.String)[np.frombuffer(judge_of, np.uint8)]
    verdicts.table = _with_more(known, rows_at(contents, places), fresh.frame(), by)
    for row in verdicts.table.filter(pl.col("reason").is_not_null()).iter_rows(named=True):
        error = ImageError(row["reason"], row["detail"], fix=row["fix"])
        verdicts.refused[row["content_hash"]] = error
    return verdicts


def _with_more(
    known: pl.DataFrame, contents: pl.DataFrame, said: pl.DataFrame, by: pl.Series
) -> pl.DataFrame:
    """The verdicts known, and those said now of other contents."""
    if said.is_empty():
        return known
    made = put_beside(put_beside(contents.select("content_hash"), said), by.to_frame())
    return pl.concat([known, made.select(PIXELS.keys())])


def judges() -> Iterator[str]:
    """What verdicts about pixels may depend on beside them, for files of one format or another."""
    yield from (f"{decoder} {LOOK_VERSION}" for decoder in decoders())


class _Decoded(NamedTuple):
    """What one file turned out to be.

    Attributes:
        error: Why it is not the sound image that the scan saw; None where it is.
        perceptual_hash: Of a sound one that is not of one colour.
        judge: Of `judges`, the one of its format; empty where it could not be read.
    """

    error: ImageError | None
    perceptual_hash: int | None = None
    judge: str = ""


def _decoded(file: File, row: Row, max_px: int) -> _Decoded:
    judge = ""
    try:
        data = read_bytes(file)
        judge = f"{decoder_of(sniff(data[:64]))} {LOOK_VERSION}"
        if hash_bytes(data) != row["content_hash"]:
            raise changed_error(file)
        is_big = row["height"] * row["width"] > BIG_IMAGE_PX
        with _one_big_image if is_big else nullcontext(), one_image(str(file)):
            image = decode(data, _ANY_COLOUR, max_px=max_px)
        size = Size(image.height, image.width)
        if size != (row["height"], row["width"]):
            detail = f"its header says {row['height']}x{row['width']}, its pixels are {size}"
            raise ImageError("size_disagrees", detail, where=str(file), fix="export it again, or remove it")
        return _Decoded(None, perceptual_hash(image), judge)
    except ImageError as err:
        return _Decoded(err, None, judge)
