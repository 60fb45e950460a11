"""validated_dataset: the images that decode to the last pixel, each with its caption.

A verdict about pixels belongs to a content hash and a decoder: the same bytes are decoded once, whatever
their file is called and however often the job runs, and a repaired file has other bytes. A caption belongs to
the stat of its file and the settings it is read by: only a changed one is read again.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from pipeline.geometry import Size
from pipeline.image_formats import ImageError
from pipeline.images import (
    DECODER,
    changed_error,
    decode,
    hash_bytes,
    one_image,
    read_bytes,
)
from pipeline.ingest.captions import Caption, caption_of, sidecar_path
from pipeline.ingest.discover import CLOCK_GRANULARITY_NS
from pipeline.ingest.duplicates import HASH_VERSION, duplicate_groups, perceptual_hash
from pipeline.ingest.funnel import Funnel, by_reason, refusal
from pipeline.ingest.known import (
    CAPTIONS,
    PIXELS,
    SIDECAR_STAT,
    Known,
    caption_rule,
    same_sidecars,
    stats_of,
)
from pipeline.ingest.listed import captions_by_path, focus_by_path, focus_of, listed_columns
from pipeline.ingest.parallel import in_threads
from pipeline.ingest.selection import select
from pipeline.ingest.variants import variants
from pipeline.reports import Log, Report, StageResult, Stopwatch, read_report
from pipeline.tables import DUPLICATE, REJECTED, SCHEMAS, Tables, in_order, validated

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings, Recipe

STAGE = "validated_dataset"

BIG_IMAGE_PX = 25_000_000
"""Larger images are decoded one at a time, so that memory does not grow with the number of threads."""

OF_CONTENT = frozenset(["truncated", "undecodable", "not_an_image", "plugin_missing", "empty_file"])
"""Reasons that hold for the bytes of a file, wherever it lies; others are looked at anew, such as
`out_of_memory`."""

_ANY_COLOUR = (255, 255, 255)

_one_big_image = threading.Lock()

Row = dict[str, Any]


@dataclass
class _Verdicts:
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


@dataclass(frozen=True)
class _Captions:
    """What captions and focuses are made of, by dataset."""

    settings: Mapping[str, DatasetSettings]
    listed: Mapping[str, Mapping[str, tuple[str, ...]]]
    focuses: Mapping[str, Mapping[str, tuple[float, float]]]

    @classmethod
    def of(cls, recipe: Recipe, listings: Mapping[str, pl.DataFrame]) -> _Captions:
        settings = {each.name: each for each in recipe.datasets}
        listed = {
            name: captions_by_path(settings[name], table)
            for name, table in listings.items()
            if settings[name].captions.from_ == "column"
        }
        focuses = {
            name: focus_by_path(settings[name], table)
            for name, table in listings.items()
            if settings[name].focus_columns is not None
        }
        return cls(settings, listed, focuses)

    def read(self, row: Row) -> Row:
        """The columns of `known.CAPTIONS` and the focus of one image.

        Raises:
            ImageError: As `caption_of` and `focus_of`.
        """
        settings, path = self.settings[row["dataset"]], row["path"]
        read_ns, stat = time.time_ns(), (-1, -1, -1, -1)
        if settings.captions.from_ == "sidecar":
            # Before it is read: of a file that changes meanwhile the older stat is kept, and read again.
            stat = stats_of([f"{settings.root}/{sidecar_path(path, settings.captions.suffix)}"])[0].tolist()
        said = self.listed.get(row["dataset"], {}).get(path)
        caption: Caption = caption_of(settings.captions, settings.root, path, said)
        focus_x, focus_y = focus_of(self.focuses.get(row["dataset"], {}), path)
        first, *more = variants(settings.captions, caption.texts)
        return {
            "caption": first,
            "more_captions": json.dumps(more, ensure_ascii=False),
            "caption_from": caption.source,
            "focus_x": focus_x,
            "focus_y": focus_y,
            "caption_read_ns": read_ns,
            **dict(zip(SIDECAR_STAT, stat, strict=True)),
        }


def validate(
    recipe: Recipe, raw: pl.DataFrame, tables: Tables, *, log: Log, remember: bool = True
) -> StageResult:
    """The rows of raw_images whose file is unchanged, decodes completely, and has a caption.

    One sample has one reason to be rejected, the first of: its file, its pixels, its caption.

    Args:
        recipe: Its `datasets`.
        raw: Table raw_images.
        tables: Where what earlier runs found out is kept.
        log: Told the funnel, and how far it is.
        remember: Whether what is found out now is kept for the next run.
    """
    watch = Stopwatch()
    listings = {settings.name: table for settings, table in listed_columns(recipe.datasets)}
    chosen, left_out = select(recipe, raw, listings, stage=STAGE)
    if len(left_out):
        log(f"{len(left_out):,} images are left out by filters and limits")
    known = Known(tables)
    before = known.pixels(_judge_name())
    log(f"{len(chosen):,} images, verdicts of {len(before):,} contents are known")
    verdicts = _judge(recipe, chosen, before, log)
    captions = _Captions.of(recipe, listings)
    told = _with_rule(recipe, chosen)
    same = _as_before(recipe, told, verdicts, known.captions)
    fresh, refused = _looked_at(told.join(same, on="sample_id", how="anti"), verdicts, captions, log)
    everything = in_order(pl.concat([same, fresh]) if len(fresh) else same, ["sample_id"])
    once, copies = _without_copies(recipe, everything)
    looks = _looks(verdicts.table, recipe.checks.near_duplicate_bits)
    table = once.join(looks, on="content_hash", how="left", maintain_order="left").select(
        pl.col(name).cast(kind) for name, kind in SCHEMAS[STAGE].items()
    )
    rejected = pl.concat([left_out, refused, copies]).sort("sample_id")
    if remember:
        of_raw = verdicts.table.join(raw, on="content_hash", how="semi")
        known.write(of_raw, everything.filter(pl.col("rule") != "").select(*CAPTIONS))
    funnel = _funnel(recipe, tables, len(table), rejected)
    report = _report(raw, table, rejected, verdicts) | {"funnel": funnel.rows()} | watch.numbers()
    for line in funnel.lines():
        log(line)
    refused = validated("rejected", rejected, "what was found invalid")
    return StageResult(validated(STAGE, table, "what was found valid"), refused, report)


def _with_rule(recipe: Recipe, chosen: pl.DataFrame) -> pl.DataFrame:
    """With `root`, and `rule`: empty where more than a file and settings decide, such as a listing."""
    rules = {
        each.name: (caption_rule(each) if each.focus_columns is None else None) or ""
        for each in recipe.datasets
    }
    roots = {each.name: str(each.root) for each in recipe.datasets}
    of_dataset = pl.col("dataset")
    return chosen.with_columns(
        rule=of_dataset.replace_strict(rules, return_dtype=pl.String),
        root=of_dataset.replace_strict(roots, return_dtype=pl.String),
    )


_COLUMNS: dict[str, Any] = {
    **{name: kind for name, kind in SCHEMAS[STAGE].items() if name not in ("duplicate_group", "one_colour")},
    **CAPTIONS,
}


def _without_copies(recipe: Recipe, rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """What is kept of sorted rows, and as rejected rows the copies: same dataset, bytes and captions."""
    once = [each.name for each in recipe.datasets if each.duplicates == "keep_first"]
    same = ["dataset", "content_hash", "caption", "more_captions"]
    first = pl.col("sample_id").first().over(same)
    is_copy = pl.col("dataset").is_in(once) & (pl.col("sample_id") != first)
    copies = rows.with_columns(first=first).filter(is_copy)
    said = copies.with_columns(
        stage=pl.lit(STAGE),
        reason=pl.lit(DUPLICATE),
        detail=pl.format("its bytes and caption are those of {}, which is kept", "first"),
        fix=pl.lit("remove one of the two, or set duplicates: keep_all; repeats show a dataset more often"),
    )
    return rows.filter(~is_copy), said.select(pl.col(name).cast(kind) for name, kind in REJECTED.items())


def _looks(pixels: pl.DataFrame, distance: int) -> pl.DataFrame:
    """The two columns of each sound content that say what it looks like."""
    sound = pixels.filter(pl.col("reason").is_null()).select("content_hash", "perceptual_hash")
    one_colour = sound.select("content_hash", one_colour=pl.col("perceptual_hash").is_null())
    return duplicate_groups(sound, distance).join(one_colour, on="content_hash")


def _as_before(
    recipe: Recipe, rows: pl.DataFrame, verdicts: _Verdicts, captions: pl.DataFrame
) -> pl.DataFrame:
    """The samples of which nothing has changed, as `_COLUMNS`: file, pixels' verdict and caption."""
    sound = verdicts.table.filter(pl.col("reason").is_null())
    known = rows.join(captions, on=["sample_id", "rule"]).join(sound, on="content_hash", how="semi")
    if verdicts.by_sample:
        known = known.filter(~pl.col("sample_id").is_in(list(verdicts.by_sample)))
    now = stats_of(known.select(pl.format("{}/{}", "root", "path")).to_series())
    unchanged = (known["file_bytes"].to_numpy() == now[:, 0]) & (known["mtime_ns"].to_numpy() == now[:, 1])
    known = known.filter(pl.Series(unchanged))
    known = known.filter(same_sidecars(known, pl.col("root"), CLOCK_GRANULARITY_NS))
    middle = {"focus_x": pl.lit(0.5), "focus_y": pl.lit(0.5), "decoder": pl.lit(DECODER)}
    return known.with_columns(**middle).select(pl.col(name).cast(kind) for name, kind in _COLUMNS.items())


def _looked_at(
    rows: pl.DataFrame, verdicts: _Verdicts, captions: _Captions, log: Log
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The others, looked at one by one: what is kept, as `_COLUMNS`, and what is rejected."""

    def look(row: Row) -> Row:
        try:
            _require_unchanged(f"{row['root']}/{row['path']}", row)
            problem = verdicts.of(row)
            if problem is not None:
                raise problem
            return captions.read(row)
        except ImageError as err:
            return refusal(err, STAGE, row["content_hash"])

    kept: list[Row] = []
    rejected: list[Row] = []
    items = rows.rows(named=True)
    # A caption is a few system calls: two threads waiting for each other's lock take twice the time of one.
    looked = in_threads(look, items, log=log, doing="captions read", threads=1)
    for row, outcome in zip(items, looked, strict=True):
        made = {**row, "decoder": DECODER, **outcome}
        columns = REJECTED if "reason" in outcome else _COLUMNS
        (rejected if "reason" in outcome else kept).append({name: made[name] for name in columns})
    return pl.DataFrame(kept, schema=_COLUMNS), pl.DataFrame(rejected, schema=REJECTED)


def _judge(recipe: Recipe, rows: pl.DataFrame, known: pl.DataFrame, log: Log) -> _Verdicts:
    """What is known of each content; one file of those of which nothing is known is decoded."""
    verdicts = _Verdicts(known)
    roots = {each.name: each.root for each in recipe.datasets}
    max_px = recipe.checks.max_image_pixels
    unknown: dict[str, list[Row]] = {}
    for row in rows.join(known, on="content_hash", how="anti").iter_rows(named=True):
        unknown.setdefault(row["content_hash"], []).append(row)

    def judge(same: list[Row]) -> list[_Decoded]:
        """One answer a file until one is about the content; the others then need none."""
        answers: list[_Decoded] = []
        for row in same:
            answers.append(_decoded(roots[row["dataset"]] / row["path"], row, max_px))
            error = answers[-1].error
            if error is None or error.reason in OF_CONTENT:
                break
        return answers

    groups = list(unknown.values())
    fresh: list[Row] = []
    for group, answers in zip(
        groups, in_threads(judge, groups, log=log, doing="images decoded"), strict=True
    ):
        verdicts.decoded += 1
        last = answers[-1]
        if last.error is None or last.error.reason in OF_CONTENT:
            said: Row = {} if last.error is None else refusal(last.error, STAGE, None)
            said["perceptual_hash"] = last.perceptual_hash
            fresh.append({**said, "content_hash": group[0]["content_hash"], "decoder": _judge_name()})
        for row, answer in zip(group, answers, strict=False):
            if answer.error is not None:
                verdicts.by_sample[row["sample_id"]] = answer.error
    made = pl.DataFrame([{name: row.get(name) for name in PIXELS} for row in fresh], schema=PIXELS)
    verdicts.table = pl.concat([known, made])
    for row in verdicts.table.filter(pl.col("reason").is_not_null()).iter_rows(named=True):
        error = ImageError(row["reason"], row["detail"], fix=row["fix"])
        verdicts.refused[row["content_hash"]] = error
    return verdicts


def _judge_name() -> str:
    """What a verdict about pixels depends on beside them."""
    return f"{DECODER} {HASH_VERSION}"


class _Decoded(NamedTuple):
    """What one file turned out to be.

    Attributes:
        error: Why it is not the sound image that the scan saw; None where it is.
        perceptual_hash: Of a sound one that is not of one colour.
    """

    error: ImageError | None
    perceptual_hash: int | None = None


def _decoded(path: Path, row: Row, max_px: int) -> _Decoded:
    try:
        data = read_bytes(path)
        if hash_bytes(data) != row["content_hash"]:
            raise changed_error(path)
        is_big = row["height"] * row["width"] > BIG_IMAGE_PX
        with _one_big_image if is_big else nullcontext(), one_image(str(path)):
            image = decode(data, _ANY_COLOUR, max_px=max_px)
        size = Size(image.height, image.width)
        if size != (row["height"], row["width"]):
            detail = f"its header says {row['height']}x{row['width']}, its pixels are {size}"
            raise ImageError("size_disagrees", detail, where=str(path), fix="export it again, or remove it")
        return _Decoded(None, perceptual_hash(image))
    except ImageError as err:
        return _Decoded(err)


def _require_unchanged(path: str, row: Row) -> None:
    with one_image(path):
        stat = os.stat(path)  # noqa: PTH116 - a hundred thousand times, and without making a Path
    if (stat.st_size, stat.st_mtime_ns) != (row["file_bytes"], row["mtime_ns"]):
        raise changed_error(path)


def _report(raw: pl.DataFrame, kept: pl.DataFrame, rejected: pl.DataFrame, verdicts: _Verdicts) -> Report:
    lengths = kept["caption"].str.len_chars()
    sources = kept["caption_from"].str.split(":").list.first().value_counts().sort("caption_from")
    return {
        "samples": len(kept),
        "in": len(raw),
        "kept": len(kept),
        "rejected": len(rejected),
        "rejected_by_reason": by_reason(rejected["reason"]),
        "decoded": verdicts.decoded,
        "known": raw["content_hash"].n_unique() - verdicts.decoded,
        "captions_from": dict(sources.rows()),
        "caption_characters": {
            "min": lengths.min(),
            "median": lengths.sort()[len(lengths) // 2],
            "max": lengths.max(),
        }
        if len(lengths)
        else {},
    }


def _funnel(recipe: Recipe, tables: Tables, num_kept: int, rejected: pl.DataFrame) -> Funnel:
    """From the files found by the scan to the samples kept here."""
    scanned = read_report(recipe.output_dir, "raw_images") or {}
    of_scan = tables.read_rejected("raw_images")
    reasons = by_reason(pl.concat([of_scan["reason"], rejected["reason"]]))
    return Funnel(
        found=num_kept + sum(reasons.values()),
        passed_over=scanned.get("passed_over", {}),
        rejected=reasons,
        kept=num_kept,
    )
