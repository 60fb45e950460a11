"""validated_dataset: the images that decode to the last pixel, each with its caption.

A verdict about pixels belongs to a content hash and a decoder: the same bytes are decoded once, whatever
their file is called and however often the job runs, and a repaired file has other bytes. A caption belongs to
the stat of its file and the settings it is read by: only a changed one is read again.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from pipeline.errors import DatasetError, counted
from pipeline.images.decode import (
    DECODER,
    File,
    changed_error,
    one_image,
)
from pipeline.images.formats import ImageError
from pipeline.raw_images.funnel import Funnel, by_reason, refusal
from pipeline.raw_images.gathered import Gathered, Rows, rows_at
from pipeline.raw_images.manifest import captions_by_path, focus_by_path, focus_of, listed_columns
from pipeline.raw_images.parallel import in_threads
from pipeline.raw_images.scan_index import (
    CAPTIONS,
    SIDECAR_STAT,
    Known,
    caption_rule,
    same_files,
    same_sidecars,
    stats_in,
)
from pipeline.raw_images.sidecars import sidecar_path
from pipeline.raw_images.stage import CLOCK_GRANULARITY_NS
from pipeline.reporting.reports import Log, Report, StageResult, Stopwatch, read_report
from pipeline.storage.columns import (
    beside,
    is_first,
    num_distinct,
    places_in,
    put_beside,
    repeated,
    with_constant,
)
from pipeline.storage.needed_columns import NEEDED
from pipeline.storage.source import Source, source_at, threads_for
from pipeline.storage.tables import DUPLICATE, REJECTED, SCHEMAS, Tables, in_order, only, validated, without
from pipeline.validated_dataset.captions import Caption, caption_of
from pipeline.validated_dataset.decode_check import Verdicts, judge, judges
from pipeline.validated_dataset.duplicates import duplicate_groups
from pipeline.validated_dataset.filters import select
from pipeline.validated_dataset.variants import variants

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings, Recipe

STAGE = "validated_dataset"

Row = dict[str, Any]


@dataclass(frozen=True)
class _Captions:
    """What captions and focuses are made of, by dataset."""

    settings: Mapping[str, DatasetSettings]
    sources: Mapping[str, Source]
    listed: Mapping[str, Mapping[str, tuple[str, ...]]]
    focuses: Mapping[str, Mapping[str, tuple[float, float]]]

    @classmethod
    def of(
        cls, recipe: Recipe, sources: Mapping[str, Source], listings: Mapping[str, pl.DataFrame]
    ) -> _Captions:
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
        return cls(settings, sources, listed, focuses)

    def with_sidecar(self, rows: pl.DataFrame) -> pl.DataFrame:
        """With `sidecar`, the path of each caption's file; null where there is none."""
        suffixes = {
            name: each.captions.suffix if each.captions.from_ == "sidecar" else None
            for name, each in self.settings.items()
        }
        paths = [
            None if (suffix := suffixes[dataset]) is None else sidecar_path(path, suffix)
            for dataset, path in rows.select("dataset", "path").iter_rows()
        ]
        return put_beside(rows, pl.DataFrame({"sidecar": paths}, schema={"sidecar": pl.String}))

    def read(self, row: Row) -> Row:
        """The columns of a caption and the focus of one image.

        Args:
            row: With `caption_bytes`, the size of the caption's file as far as known.

        Raises:
            ImageError: As `caption_of` and `focus_of`.
        """
        settings, path = self.settings[row["dataset"]], row["path"]
        said = self.listed.get(row["dataset"], {}).get(path)
        source, size = self.sources[row["dataset"]], row["caption_bytes"]
        try:
            caption: Caption = caption_of(settings.captions, source, path, said, sidecar_bytes=size)
        except ImageError as err:
            if err.reason != "caption_missing" or not settings.is_manifest:
                raise
            fix = f"{err.fix}; or take them from the listing: captions: {{from: column, columns: [...]}}"
            raise ImageError(err.reason, err.detail, where=err.where, fix=fix) from err
        focus_x, focus_y = focus_of(self.focuses.get(row["dataset"], {}), path)
        first, *more = variants(settings.captions, caption.texts)
        return {
            "caption": first,
            "more_captions": json.dumps(more, ensure_ascii=False),
            "caption_from": caption.source,
            "focus_x": focus_x,
            "focus_y": focus_y,
        }


def validate(
    recipe: Recipe, raw: pl.DataFrame, tables: Tables, *, log: Log, remember: bool = True
) -> StageResult:
    """The rows of raw_images whose file is unchanged, decodes completely, and has a caption.

    One sample has one reason to be rejected, the first of: its file, its pixels, its caption.

    Args:
        recipe: Its `datasets`.
        raw: Table raw_images, or the columns of it that are `NEEDED`.
        tables: Where what earlier runs found out is kept.
        log: Told how far it is; and the funnel, where this is remembered.
        remember: Whether what is found out now is kept for the next run.

    Raises:
        DatasetError: `raw` was made by a recipe with other datasets, or a listing cannot be used.
    """
    watch = Stopwatch()
    _require_same_datasets(recipe, raw)
    sources = {settings.name: source_at(settings.root) for settings in recipe.datasets}
    listings = {settings.name: table for settings, table in listed_columns(recipe.datasets)}
    chosen, left_out = select(recipe, raw.select(NEEDED[STAGE]["raw_images"]), listings, stage=STAGE)
    if len(left_out):
        log(counted(len(left_out), "image is", "images are") + " left out by filters and limits")
    known = Known(tables)
    before = known.pixels(judges())
    log(f"{counted(len(chosen), 'image')} to judge; earlier runs decoded {counted(len(before), 'content')}")
    verdicts = judge(recipe, sources, chosen, before, log=log)
    captions = _Captions.of(recipe, sources, listings)
    told = _with_rule(recipe, chosen)
    same = _as_before(sources, told, verdicts, known.captions, log=log)
    others = without(told, same)
    del told
    fresh, refused = _looked_at(others, verdicts, captions, log)
    everything = in_order(pl.concat([same, fresh]) if len(fresh) else same, ["sample_id"])
    once, copies = _without_copies(recipe, everything)
    looks = _looks(once["content_hash"], verdicts.table, recipe.checks.near_duplicate_bits)
    table = beside(once, looks, on="content_hash").select(SCHEMAS[STAGE].keys())
    rejected = pl.concat([left_out, refused, copies]).sort("sample_id")
    if remember:
        known.write(
            _of(raw["content_hash"], verdicts.table),
            only(everything, everything["rule"] != "").select(*CAPTIONS),
        )
    funnel = _funnel(recipe, tables, len(table), rejected)
    num_known = num_distinct(chosen["content_hash"]) - verdicts.decoded
    report = (
        _report(raw, table, rejected, verdicts.decoded, num_known)
        | {"funnel": funnel.rows()}
        | watch.numbers()
    )
    for line in funnel.lines() if remember else ():  # a plan's scan has left nothing that it could count
        log(line)
    refused = validated("rejected", rejected, "what was found invalid")
    return StageResult(validated(STAGE, table, "what was found valid"), refused, report)


def _require_same_datasets(recipe: Recipe, raw: pl.DataFrame) -> None:
    """Nothing, where the recipe still has every dataset of which there are images.

    Raises:
        DatasetError: It lacks some: one was renamed or removed since the scan.
    """
    names = [each.name for each in recipe.datasets]
    gone = sorted(set(raw["dataset"].unique()).difference(names))
    if gone:
        raise DatasetError(
            f"the table raw_images has images of {', '.join(gone)}, and the recipe's datasets are "
            + ", ".join(names),
            where=f"{recipe.source}, datasets",
            fix="materialize raw_images first: it was made before the recipe was changed",
        )


def _with_rule(recipe: Recipe, chosen: pl.DataFrame) -> pl.DataFrame:
    """With `rule`: empty where more than a file and settings decide, such as a listing."""
    rules = {
        each.name: (caption_rule(each) if each.focus_columns is None else None) or ""
        for each in recipe.datasets
    }
    rule = chosen["dataset"].replace_strict(rules, return_dtype=pl.String).alias("rule")
    return put_beside(chosen, rule.to_frame())


_COLUMNS: dict[str, Any] = {
    **{name: kind for name, kind in SCHEMAS[STAGE].items() if name not in ("duplicate_group", "one_colour")},
    **CAPTIONS,
}


_SAID = {name: _COLUMNS[name] for name in ("caption", "more_captions", "caption_from", "focus_x", "focus_y")}
"""What a caption's file and a listing say of an image."""


def _without_copies(recipe: Recipe, rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """What is kept of sorted rows, and as rejected rows the copies: same dataset, bytes and captions."""
    once = [each.name for each in recipe.datasets if each.duplicates == "keep_first"]
    same = ["dataset", "content_hash", "caption", "more_captions"]
    alike = rows.filter(repeated(rows["content_hash"]) & rows["dataset"].is_in(once))
    copies = alike.with_columns(first=pl.col("sample_id").first().over(same)).filter(
        pl.col("sample_id") != pl.col("first")
    )
    said = copies.with_columns(
        stage=pl.lit(STAGE),
        reason=pl.lit(DUPLICATE),
        detail=pl.format("its bytes and caption are those of {}, which is kept", "first"),
        fix=pl.lit("remove one of the two, or set duplicates: keep_all; repeats show a dataset more often"),
    )
    kept = only(rows, ~rows["sample_id"].is_in(copies["sample_id"].implode()))
    return kept, said.select(pl.col(name).cast(kind) for name, kind in REJECTED.items())


def _of(contents: pl.Series, pixels: pl.DataFrame) -> pl.DataFrame:
    """The verdicts on these contents, one for each on which there is any, in their order."""
    if contents.equals(pixels["content_hash"]):
        return pixels
    contents = contents.filter(is_first(contents))
    places = places_in(pixels["content_hash"], contents).drop_nulls()
    return pixels[places] if len(places) < len(pixels) or not places.is_sorted() else pixels


def _looks(contents: pl.Series, pixels: pl.DataFrame, distance: int) -> pl.DataFrame:
    """The two columns of each content, all of them sound, that say what it looks like.

    Only these are compared: two that look alike by way of a third, which earlier runs knew and this one does
    not keep, are no group.
    """
    sound = _of(contents, pixels.select("content_hash", "perceptual_hash"))
    groups = duplicate_groups(sound, distance)  # in the same order
    return groups.with_columns(one_colour=sound["perceptual_hash"].is_null())


def _as_before(
    sources: Mapping[str, Source],
    rows: pl.DataFrame,
    verdicts: Verdicts,
    captions: pl.DataFrame,
    *,
    log: Log,
) -> pl.DataFrame:
    """The samples of which nothing has changed, as `_COLUMNS`: file, pixels' verdict and caption."""
    if rows["sample_id"].equals(captions["sample_id"]) and rows["rule"].equals(captions["rule"]):
        known = put_beside(rows, captions.drop("sample_id", "rule"))
    else:
        known = rows.join(captions, on=["sample_id", "rule"])
    sound = only(verdicts.table, verdicts.table["reason"].is_null())["content_hash"]
    known = only(known, known["content_hash"].is_in(sound.implode()))
    if verdicts.by_sample:
        known = known.filter(~pl.col("sample_id").is_in(list(verdicts.by_sample)))
    known = only(known, same_files(sources, known, log=log))
    known = only(known, same_sidecars(sources, known, CLOCK_GRANULARITY_NS, log=log))
    for name, value in (("focus_x", 0.5), ("focus_y", 0.5), ("decoder", DECODER)):
        known = with_constant(known, name, value, _COLUMNS[name])
    return known.select(*_COLUMNS)


def _changed(file: File) -> ImageError:
    """Why a file is not the one that the scan saw."""
    with one_image(str(file)):
        file.read_bytes()
    return changed_error(file)


def _looked_at(
    rows: pl.DataFrame, verdicts: Verdicts, captions: _Captions, log: Log
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The others, looked at one by one: what is kept, as `_COLUMNS`, and what is rejected."""

    def look(values: tuple[Any, ...]) -> Row:
        row = dict(zip(rows.columns, values, strict=True))
        try:
            if not row["same"]:
                raise _changed(sources[row["dataset"]].file(row["path"]))
            problem = verdicts.of(row)
            if problem is not None:
                raise problem
            return captions.read(row)
        except ImageError as err:
            return refusal(err, STAGE, row["content_hash"])

    sources = captions.sources
    rows = put_beside(rows, same_files(sources, rows, log=log).alias("same").to_frame())
    rows = captions.with_sidecar(rows)
    # Before it is read: of a file that changes meanwhile the older stat is kept, and read again.
    rows = with_constant(rows, "caption_read_ns", time.time_ns(), pl.Int64)
    rows = put_beside(rows, _sidecar_stats(sources, rows, log))
    # A caption is a few system calls: two threads waiting for each other's lock take twice the time of one.
    threads = threads_for(sources.values()) or 1
    looked = in_threads(look, Rows(rows), log=log, doing="captions read", threads=threads)
    said, rejected, places = Gathered(_SAID), Gathered(REJECTED), array("q")
    for place, outcome in enumerate(looked):
        if "reason" in outcome:
            rejected.add({**rows.row(place, named=True), **outcome})
        else:
            places.append(place)
            said.add(outcome)
    whole = with_constant(put_beside(rows_at(rows, places), said.frame()), "decoder", DECODER, pl.String)
    return whole.select(*_COLUMNS), rejected.frame()


def _sidecar_stats(sources: Mapping[str, Source], rows: pl.DataFrame, log: Log) -> pl.DataFrame:
    """`SIDECAR_STAT` of each row's caption file; -1 where there is none."""
    stats = np.full((len(rows), len(SIDECAR_STAT)), -1, dtype=np.int64)
    for part, now, _ in stats_in(sources, rows, "sidecar", log=log, doing="captions found"):
        stats[part["row"].to_numpy()] = now
    return pl.DataFrame(stats, schema=list(SIDECAR_STAT))


def _report(
    raw: pl.DataFrame, kept: pl.DataFrame, rejected: pl.DataFrame, num_decoded: int, num_known: int
) -> Report:
    lengths = kept["caption"].str.len_chars()
    sources = kept["caption_from"].str.split(":").list.first().value_counts().sort("caption_from")
    return {
        "samples": len(kept),
        "in": len(raw),
        "kept": len(kept),
        "rejected": len(rejected),
        "rejected_by_reason": by_reason(rejected["reason"]),
        "decoded": num_decoded,
        "known": num_known,
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
