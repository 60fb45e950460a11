"""Stage validated_dataset: keep the images that decode completely and have a caption.

Results of earlier runs are reused. A decode result belongs to a content hash and a decoder version (see
`decode_check`). A caption belongs to the stat of its file and the settings it was read by, so only changed
captions are read again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import DatasetError, counted
from pipeline.images.decode import DECODER, File, open_content
from pipeline.images.formats import ImageError
from pipeline.images.pixel_values import PIXEL_VALUES
from pipeline.log import Log
from pipeline.raw_images.commits import at_scanned_commits
from pipeline.raw_images.manifest import (
    captions_by_path,
    composed,
    focus_by_path,
    focus_of,
    manifests_with_columns,
)
from pipeline.raw_images.parallel import in_threads
from pipeline.raw_images.scan_index import (
    CAPTIONS,
    SIDECAR,
    ScanIndex,
    caption_rule,
    sidecar_stats,
    unchanged_files,
    unchanged_sidecars,
)
from pipeline.raw_images.sources import sources_of
from pipeline.raw_images.stage import CLOCK_GRANULARITY_NS, MAX_NAMED
from pipeline.raw_images.walk import without_suffix
from pipeline.reporting.rejections import count_by_reason, rejection
from pipeline.reporting.reports import Report, StageResult, Stopwatch, read_report
from pipeline.side_inputs import SIDE_INPUTS
from pipeline.storage.needed_columns import NEEDED
from pipeline.storage.source import Source, threads_for
from pipeline.storage.table_columns import PICTURE_COLUMNS
from pipeline.storage.tables import (
    DUPLICATE,
    REJECTED,
    SCHEMAS,
    Tables,
    columns_in,
    usable_and_rejected,
    validated,
)
from pipeline.validated_dataset.captions import caption_of, differing_files
from pipeline.validated_dataset.decode_check import DecodeResults, current_results, decode_contents
from pipeline.validated_dataset.duplicates import duplicate_groups, view_groups
from pipeline.validated_dataset.edited_captions import EditedCaptions
from pipeline.validated_dataset.filters import select
from pipeline.validated_dataset.overlays import agreement
from pipeline.validated_dataset.paired_files import PairedSamples
from pipeline.validated_dataset.side_inputs import with_side_input
from pipeline.validated_dataset.variants import variants

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings, Recipe

STAGE = "validated_dataset"

Row = dict[str, Any]

_CONTENT_COLUMNS = ("duplicate_group", "one_colour", *PICTURE_COLUMNS)
"""Columns that follow from the pixels of a sample and of similar ones."""

_SAMPLE_COLUMNS: dict[str, Any] = {
    **{name: kind for name, kind in SCHEMAS[STAGE].items() if name not in _CONTENT_COLUMNS},
    **CAPTIONS,
}
"""Columns of a sample before duplicates are searched, from validated_dataset and from the caption index."""


@dataclass(frozen=True)
class _CaptionReader:
    """A reader of captions and focus points.

    `edited` has the captions of persons, and `written` the captions of a model by sample id. Every other
    attribute maps a dataset's name to its part.
    """

    edited: EditedCaptions
    settings: Mapping[str, DatasetSettings]
    sources: Mapping[str, Source]
    manifest_captions: Mapping[str, Mapping[str, tuple[str, ...]]]
    focuses: Mapping[str, Mapping[str, tuple[float, float]]]
    written: Mapping[str, str]

    @classmethod
    def create(
        cls,
        recipe: Recipe,
        sources: Mapping[str, Source],
        manifests: Mapping[str, pl.DataFrame],
        written: Mapping[str, str],
    ) -> _CaptionReader:
        settings = {each.name: each for each in recipe.datasets}
        captions = {
            name: captions_by_path(settings[name], table)
            for name, table in manifests.items()
            if settings[name].captions.from_ == "column"
        }
        focuses = {
            name: focus_by_path(settings[name], table)
            for name, table in manifests.items()
            if settings[name].focus_columns is not None
        }
        edited = EditedCaptions(recipe.output_dir)
        return cls(edited, settings, sources, captions, focuses, written)

    def with_sidecars(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Add the column `sidecars`: the paths of an image's caption files; null in datasets without them."""
        # Other sources of captions have no file next to the image, so that nothing must be listed for them.
        sidecars = pl.lit(None, dtype=pl.List(pl.String))
        for name, settings in self.settings.items():
            if settings.captions.reads_files:
                paths = [without_suffix(pl.col("path")) + suffix for suffix in settings.captions.suffixes]
                of_dataset = pl.when(pl.col("dataset") == name).then(pl.concat_list(paths))
                sidecars = of_dataset.otherwise(sidecars)
        return rows.with_columns(sidecars=sidecars)

    def read(self, row: Row) -> Row:
        """Return the caption columns and the focus point of one image.

        `row` is a row of raw_images with `caption_bytes`, the sizes of the caption files.

        Raises:
            ImageError: See `caption_of` and `focus_of`.
        """
        dataset, path = row["dataset"], row["path"]
        settings = self.settings[dataset]
        source, texts = self.sources[dataset], self.manifest_captions.get(dataset, {}).get(composed(path))
        sizes = row["caption_bytes"] or ()
        try:
            written = self.written.get(row["sample_id"])
            caption = self.edited.read(settings.captions, row["sample_id"])
            caption = caption or caption_of(
                settings.captions, source, path, texts, sidecar_bytes=sizes, written=written
            )
        except ImageError as err:
            if err.reason != "caption_missing" or not settings.is_manifest:
                raise

            # Recipes with a manifest often forget `captions`: its default reads files next to the images.
            fix = f"{err.fix}; or use the manifest's captions: {{from: column, columns: [...]}}"
            raise ImageError(err.reason, err.detail, where=err.where, fix=fix) from err

        focus_x, focus_y = focus_of(self.focuses.get(dataset, {}), path)
        first, *more = variants(settings.captions, caption.texts)
        return {
            "caption": first,
            "more_captions": json.dumps(more, ensure_ascii=False),
            "caption_from": caption.source,
            "differing_captions": differing_files(settings.captions, source, path, caption, sizes),
            "focus_x": focus_x,
            "focus_y": focus_y,
        }


def validate(
    recipe: Recipe,
    raw: pl.DataFrame,
    tables: Tables,
    *,
    log: Log,
    written: pl.DataFrame | None = None,
    remember: bool = True,
) -> StageResult:
    """Keep the images of raw_images that are unchanged since the scan, decode completely and have a caption.

    A sample is rejected for one reason, the first of: its file, its pixels, its caption, its side inputs.

    `raw` needs only its columns in `NEEDED`. `written` is the table captions, for recipes with one. With
    `remember`, decode results and captions are stored for the next run, and the funnel is logged.

    Raises:
        DatasetError: `raw` belongs to other datasets than the recipe's, or a manifest cannot be used.
    """
    stopwatch = Stopwatch()
    _require_same_datasets(recipe, raw)
    recipe = at_scanned_commits(recipe)
    sources = sources_of(recipe)
    with_columns = manifests_with_columns(recipe.datasets, max_bytes=recipe.checks.max_file_bytes)
    manifests = {settings.name: table for settings, table in with_columns}
    chosen, filtered = select(recipe, raw.select(NEEDED[STAGE]["raw_images"]), manifests, stage=STAGE)
    if len(filtered):
        log(f"{counted(len(filtered), 'image')} excluded by filters and limits")

    # Each content without a known result is decoded once, from any of its files.
    index = ScanIndex(tables)
    known = current_results(index.decoded)
    num_reused = chosen["content_hash"].is_in(known["content_hash"].implode()).sum()
    log(f"{counted(len(chosen), 'image')} to check, {num_reused:,} of them decoded by earlier runs")
    decoded = decode_contents(recipe, sources, chosen, known, log=log)

    captions = _CaptionReader.create(recipe, sources, manifests, _written(written, chosen))
    with_rule = _with_caption_rule(recipe, captions.edited, captions.with_sidecars(chosen))
    readable, unusable = _with_captions(with_rule, decoded, captions, index.captions, log=log)
    complete, paired = readable, dict[str, PairedSamples]()
    for side_input in SIDE_INPUTS:
        read_before = index.side_input(side_input.plural, side_input.facts)
        result = with_side_input(recipe, side_input, complete, raw, read_before, log=log)
        complete, paired[side_input.plural] = result.samples, result

    # Similar images are searched last, because only kept samples may connect them.
    distinct, copies = _without_copies(recipe, complete)
    features = _features(distinct, decoded.table, recipe.checks.near_duplicate_bits, log=log)
    table = distinct.join(features, on="content_hash", maintain_order="left")
    table = _with_decoding(table, decoded.table)
    table = table.select(*columns_in(STAGE, table))
    not_paired = [each.rejected for each in paired.values()]
    rejected = pl.concat([filtered, unusable, *not_paired, copies]).sort("sample_id")
    funnel = _funnel(recipe, tables, len(table), rejected)

    # A plan does not store its scan, so its funnel would mix the numbers of two scans.
    if remember:
        checked = decoded.table.join(raw, on="content_hash", how="semi").sort("content_hash")
        captions_read = readable.filter(pl.col("rule") != "").select(*CAPTIONS)
        index.write(checked, captions_read, {name: each.index for name, each in paired.items()})
        log(funnel_text(funnel))

    num_known = chosen["content_hash"].n_unique() - decoded.num_decoded
    counts = {"decoded": decoded.num_decoded, "known": num_known, "funnel": funnel}
    unmatched = {name: each.unmatched for name, each in paired.items()}
    if captions.edited.files:
        found = {*raw["sample_id"], *tables.read_rejected("raw_images")["sample_id"]}
        unmatched["edits"] = captions.edited.without_image(found)
    conflicts = _conflicts(distinct, unmatched)
    return StageResult(
        validated(STAGE, table, "valid samples"),
        validated("rejected", rejected, "invalid samples"),
        {**_report(raw, table, rejected), **conflicts, **counts, **stopwatch.numbers()},
    )


def _require_same_datasets(recipe: Recipe, raw: pl.DataFrame) -> None:
    """Raise DatasetError if a dataset of raw_images was renamed or removed in the recipe."""
    names = [each.name for each in recipe.datasets]

    # Dagster may run this stage alone, after the recipe was edited.
    missing = sorted(set(raw["dataset"].unique()).difference(names))
    if missing:
        raise DatasetError(
            f"the table raw_images has images of {', '.join(missing)}, but the recipe's datasets are "
            + ", ".join(names),
            where=f"{recipe.source}, datasets",
            fix="materialize raw_images first: the recipe has changed since",
        )


def _written(captions: pl.DataFrame | None, chosen: pl.DataFrame) -> dict[str, str]:
    """Return the captions of a model by sample id, without those of images that have changed since."""
    if captions is None:
        return {}
    current = captions.join(chosen, on=("sample_id", "content_hash"), how="semi")
    return dict(current.select("sample_id", "caption").iter_rows())


def _with_caption_rule(recipe: Recipe, edited: EditedCaptions, rows: pl.DataFrame) -> pl.DataFrame:
    """Add the column `rule`; it is empty if the captions do not follow from files next to an image."""
    rules = {
        each.name: (caption_rule(each) if each.focus_columns is None else None) or ""
        for each in recipe.datasets
    }
    rule = pl.col("dataset").replace_strict(rules, return_dtype=pl.String)
    # Edited captions are few, so they are read on every run.
    is_edited = pl.col("sample_id").is_in(list(edited.files))
    return rows.with_columns(rule=pl.when(is_edited).then(pl.lit("")).otherwise(rule))


def _unchanged_samples(
    sources: Mapping[str, Source],
    rows: pl.DataFrame,
    decoded: DecodeResults,
    captions: pl.DataFrame,
    *,
    log: Log,
) -> pl.DataFrame:
    """Return the samples with unchanged image, decode result and caption, with `_SAMPLE_COLUMNS`."""
    # Each join drops samples that changed in one respect; the remaining ones are read by `_read_samples`.
    valid_contents = decoded.table.filter(pl.col("reason").is_null())
    # Joining by both texts would take three times as long.
    samples = rows.join(captions, on="sample_id").filter(pl.col("rule") == pl.col("rule_right"))
    samples = samples.join(valid_contents, on="content_hash", how="semi")

    # A file may fail although its content decodes, for example if it has vanished.
    samples = samples.filter(~pl.col("sample_id").is_in(list(decoded.file_errors)))

    files = unchanged_files(sources, samples, log=log)
    samples = samples.join(files, on="sample_id", how="semi")
    sidecars = unchanged_sidecars(sources, samples, CLOCK_GRANULARITY_NS, log=log)
    samples = samples.join(sidecars, on="sample_id", how="semi")

    # Samples with a focus point depend on a manifest, so they have no rule and are not among these.
    samples = samples.with_columns(focus_x=pl.lit(0.5), focus_y=pl.lit(0.5), decoder=pl.lit(DECODER))
    return samples.select(*_SAMPLE_COLUMNS)


def _with_captions(
    rows: pl.DataFrame, decoded: DecodeResults, captions: _CaptionReader, known: pl.DataFrame, *, log: Log
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return samples with a usable image and caption (`_SAMPLE_COLUMNS`), and the rejected rows.

    Samples with an unchanged file and caption are taken from `known` and not read again.
    """
    unchanged = _unchanged_samples(captions.sources, rows, decoded, known, log=log)
    others = rows.join(unchanged, on="sample_id", how="anti", maintain_order="left")
    fresh, rejected = _read_samples(others, decoded, captions, log)
    return pl.concat([unchanged, fresh]).sort("sample_id"), rejected


def _read_samples(
    rows: pl.DataFrame, decoded: DecodeResults, captions: _CaptionReader, log: Log
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Read the captions of changed samples; return samples with `_SAMPLE_COLUMNS`, and rejected rows."""
    sources = captions.sources

    # Unchanged files are not hashed again: their content was hashed by the scan.
    unchanged = set(unchanged_files(sources, rows, log=log)["sample_id"])

    # The stats come first: if a file changes while it is read, its stale stat causes the next run to read it
    # again.
    read_ns = time.time_ns()
    files = rows.select("sample_id", "dataset", "sidecars")
    stats = sidecar_stats(sources, files, log=log, doing="captions found")
    rows = rows.join(stats, on="sample_id", how="left", maintain_order="left")

    def read(row: Row) -> Row:
        try:
            # A file that changed after the scan has another size and hash than its row.
            if row["sample_id"] not in unchanged:
                _require_content(sources[row["dataset"]].file(row["path"]), row["content_hash"])
            error = decoded.error_of(row)
            if error is not None:
                raise error
            return {**row, **captions.read(row), "decoder": DECODER, "caption_read_ns": read_ns}
        except ImageError as err:
            return {**row, **rejection(err, STAGE, row["content_hash"])}

    # Local captions take a few system calls each, and threads would only contend for the interpreter lock.
    threads = threads_for(sources.values()) or 1
    results = in_threads(read, rows.rows(named=True), log=log, doing="captions read", threads=threads)
    return usable_and_rejected(results, _SAMPLE_COLUMNS, REJECTED)


def _require_content(file: File, content_hash: str) -> None:
    """Raise ImageError if a file cannot be read any more, or has other content than at the scan."""
    # A new time alone is not a change: another machine may have a copy of the dataset on its own disk.
    with open_content(file, content_hash):
        pass


def _without_copies(recipe: Recipe, samples: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the samples without copies of the same dataset, bytes and captions; and the rejected copies."""
    # Within a dataset only: two datasets may show one image with other repeats or another role.
    deduplicated = [each.name for each in recipe.datasets if each.duplicates == "keep_first"]
    same = ["dataset", "content_hash", "caption", "more_captions"]
    side_inputs = [each.hashes() for each in SIDE_INPUTS if each.hash_column in samples.columns]

    # Few samples share their bytes with another one, and only these are compared.
    candidates = samples.filter(
        pl.col("content_hash").is_duplicated() & pl.col("dataset").is_in(deduplicated)
    )

    # `over` treats missing values as equal, such as the masks of two samples without one.
    with_first = candidates.with_columns(first=pl.col("sample_id").first().over(*same, *side_inputs))
    copies = with_first.filter(pl.col("sample_id") != pl.col("first"))

    rejected = copies.select(
        "sample_id",
        "dataset",
        "path",
        stage=pl.lit(STAGE),
        reason=pl.lit(DUPLICATE),
        detail=pl.format("same bytes and caption as {}, which is kept", "first"),
        fix=pl.lit(
            "remove one of the two, or set duplicates: keep_all; use repeats to show a dataset more often"
        ),
        content_hash="content_hash",
    ).cast(pl.Schema(REJECTED))
    return samples.join(copies, on="sample_id", how="anti", maintain_order="left"), rejected


def _features(samples: pl.DataFrame, decoded: pl.DataFrame, distance: int, *, log: Log) -> pl.DataFrame:
    """Return content_hash and `_CONTENT_COLUMNS` for each content of the samples."""
    # Only the contents of these samples: two images that are similar only by way of a third, removed one are
    # not in the same group. Equal bytes are one content, so a dataset with many copies is compared only once.
    contents = decoded.join(samples, on="content_hash", how="semi").select("content_hash", *PIXEL_VALUES)
    groups = duplicate_groups(contents, distance, log=log)  # in the same order
    is_first = contents["content_hash"].is_in(groups["duplicate_group"].implode())
    features = contents.with_columns(
        groups["duplicate_group"],
        view_groups(contents, log=log),
        agreement(contents, is_first),
        one_colour=pl.col("perceptual_hash").is_null(),
    )
    return features.select("content_hash", *_CONTENT_COLUMNS)


def _with_decoding(samples: pl.DataFrame, decoded: pl.DataFrame) -> pl.DataFrame:
    """Add the column `decoding` if at least one of the samples has decoding rules."""
    contents = decoded.select("content_hash", "decoding").drop_nulls()
    contents = contents.join(samples, on="content_hash", how="semi")
    if contents.is_empty():
        return samples
    return samples.join(contents, on="content_hash", how="left", maintain_order="left")


def _report(raw: pl.DataFrame, table: pl.DataFrame, rejected: pl.DataFrame) -> Report:
    lengths = table["caption"].str.len_chars()
    sources = table["caption_from"].str.split(":").list.first().value_counts().sort("caption_from")
    return {
        "samples": len(table),
        "in": len(raw),
        "kept": len(table),
        "rejected": len(rejected),
        "rejected_by_reason": count_by_reason(rejected["reason"]),
        "captions_from": dict(sources.rows()),
        "caption_characters": {
            "min": lengths.min(),
            "median": lengths.sort()[len(lengths) // 2],
            "max": lengths.max(),
        }
        if len(lengths)
        else {},
    }


def _conflicts(samples: pl.DataFrame, unmatched: Mapping[str, Sequence[str]]) -> Report:
    """Return the part of the report on samples with different texts in two files, and on files without image.

    The counts are complete; at most `MAX_NAMED` of each are named.
    """
    conflicts = samples.filter(pl.col("differing_captions").list.len() > 0)
    used = pl.col("caption_from").str.strip_prefix(SIDECAR)
    named = conflicts.select(
        "sample_id", used=used, not_used=pl.col("differing_captions").list.join(" | ")
    ).head(MAX_NAMED)
    report: Report = {
        "caption_conflicts": len(conflicts),
        "named": {"caption_conflicts": named.rows(named=True)},
    }
    for name, paths in unmatched.items():
        if paths:
            report[f"unmatched_{name}"] = len(paths)
            report["named"][f"unmatched_{name}"] = list(paths[:MAX_NAMED])
    return report


def _funnel(recipe: Recipe, tables: Tables, num_kept: int, rejected: pl.DataFrame) -> list[Row]:
    """Return the funnel from the files that the scan found to the samples kept by this stage."""
    # The scan's files are counted in its report, because ignored files have no rows in a table.
    scan_report = read_report(recipe.output_dir, "raw_images") or {}
    scan_rejected = tables.read_rejected("raw_images")
    reasons = count_by_reason(pl.concat([scan_rejected["reason"], rejected["reason"]]))
    return funnel_rows(num_kept, passed_over=scan_report.get("passed_over", {}), rejected=reasons)


def funnel_rows(
    kept: int, *, passed_over: Mapping[str, int], rejected: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return rows of `what`, `kind` (empty for totals) and `number`, largest kinds first.

    `found` is the number of files that may be images: the `kept` samples and those that the scan and the
    validation `rejected`, which are given by reason. Other files are ignored: `passed_over`, by kind.
    """
    rows = [{"what": "found", "kind": "", "number": kept + sum(rejected.values())}]
    for what, counts in (("ignored", passed_over), ("rejected", rejected)):
        rows.append({"what": what, "kind": "", "number": sum(counts.values())})
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        rows += [{"what": what, "kind": kind, "number": number} for kind, number in ordered]
    return [*rows, {"what": "kept", "kind": "", "number": kept}]


def funnel_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows on one line: "9 found, 3 ignored (3 hidden), 1 rejected (1 truncated), 8 kept"."""
    totals = [row for row in rows if not row["kind"]]
    return ", ".join(f"{row['number']:,} {row['what']}{_kinds_text(rows, row['what'])}" for row in totals)


def _kinds_text(rows: Sequence[Mapping[str, Any]], what: str) -> str:
    """Return the numbers of each kind in parentheses; an empty text without kinds."""
    kinds = [row for row in rows if row["what"] == what and row["kind"]]
    text = ", ".join(f"{row['number']:,} {row['kind'].replace('_', ' ')}" for row in kinds)
    return f" ({text})" if text else ""
