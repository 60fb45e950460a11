"""The checks of raw_images: something was found, under distinct names, and nothing was lost on the way."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

import polars as pl

from pipeline.checks.findings import CheckContext, Finding, Outcome, findings
from pipeline.checks.outliers import outliers
from pipeline.checks.rejections import most_frequent_first, most_frequent_fixes
from pipeline.errors import counted
from pipeline.reporting.reports import Report

STAGE = "raw_images"

_SUFFIXES = {
    "JPEG": {"jpg", "jpeg", "jpe", "jfif"},
    "MPO": {"jpg", "jpeg", "jpe", "jfif", "mpo"},
    "PNG": {"png", "apng"},
    "WEBP": {"webp"},
    "AVIF": {"avif"},
    "BMP": {"bmp", "dib"},
    "TIFF": {"tif", "tiff"},
    "GIF": {"gif"},
    "JPEG2000": {"jp2", "j2k"},
    "HEIF": {"heic", "heif", "hif"},
    "JXL": {"jxl"},
}
"""Of each format, the suffixes that say so."""

_SUFFIX = r"[^/]\.([^./]+)$"
"""The last of a name that is more than a suffix, without its dot."""

_COLUMNS = (
    *("sample_id", "dataset", "height", "width", "file_bytes"),
    *("format", "mode", "channels", "notes"),
)
"""Of raw_images, what is looked at here."""


def run(context: CheckContext) -> list[Finding]:
    """One finding for each check of raw_images, from its table, its rejected rows and its report.

    Raises:
        TableError: There is no table of raw_images.
    """
    table = context.tables.read(STAGE, _COLUMNS)
    rejected = context.tables.read_rejected(STAGE)
    report = context.report(STAGE) or {}
    outcomes = {
        "images_found": _images_found(context, table, rejected, report),
        "names_distinct": _names_distinct(table, rejected),
        "conservation": _conservation(table, rejected, report),
        "shape_uniformity": _shape_uniformity(table),
        "file_size_outliers": _file_size_outliers(table),
        "oddities": _oddities(table, report),
    }
    return findings(context, STAGE, outcomes)


def _images_found(
    context: CheckContext, table: pl.DataFrame, rejected: pl.DataFrame, report: Report
) -> Outcome:
    kept = dict(table.group_by("dataset").len().rows())
    refused = dict(rejected.group_by("dataset").len().rows())
    told = report.get("datasets", {})
    rows = [
        {
            "dataset": settings.name,
            "searched": str(settings.path),
            "rejected": refused.get(settings.name, 0),
            "passed_over": _counts(told.get(settings.name, {}).get("passed_over", {})),
            "other_suffixes": _counts(told.get(settings.name, {}).get("suffixes_of_no_images", {})),
        }
        for settings in context.recipe.datasets
        if not kept.get(settings.name)
    ]
    numbers = {"images": len(table)}
    if not rows:
        return Outcome(
            True, f"{counted(len(table), 'image')} in {counted(len(kept), 'dataset')}", numbers=numbers
        )
    first = rows[0]
    if told and first["dataset"] not in told:
        summary = f"dataset {first['dataset']} has no image yet: it is in the recipe and was never scanned"
        return Outcome(False, summary, "run the cache job, which scans it", rows, numbers)
    summary = f"dataset {first['dataset']} has no image: searched {first['searched']} with its subfolders"
    if first["rejected"]:
        mine = rejected.filter(pl.col("dataset") == first["dataset"])
        by_reason = dict(mine.group_by("reason").len().sort("len", "reason", descending=[True, False]).rows())
        reasons = _counts({reason.replace("_", " "): number for reason, number in by_reason.items()})
        detail = most_frequent_first(mine).select("path", "detail").row(0)
        summary += f"; what lies there was rejected: {reasons}; {': '.join(detail)}"
        return Outcome(False, summary, most_frequent_fixes(mine), rows, numbers)
    summary += f"; passed over: {first['passed_over'] or 'nothing, it is empty'}"
    summary += f"; suffixes there: {first['other_suffixes']}" if first["other_suffixes"] else ""
    fix = "correct datasets[].path, or put images there; folders that begin with a dot are not searched"
    return Outcome(False, summary, fix, rows, numbers)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name or '(none)'}" for name, number in counts.items())


def _names_distinct(table: pl.DataFrame, rejected: pl.DataFrame) -> Outcome:
    """Names that a file system without cases, or with another Unicode form, would take for one."""
    ids = table["sample_id"]
    # Few names are alike in 64 bits of what they are folded to; those are compared whole.
    alike = _folded(ids).hash().is_duplicated()
    few = pl.DataFrame({"name": ids.filter(alike)}).with_columns(folded=_folded(ids.filter(alike)))
    groups = few.group_by("folded", maintain_order=True).agg(pl.col("name").sort())
    rows = [{"names": " | ".join(names), "differ_in": "case"} for names in groups["name"] if len(names) > 1]
    forms = rejected.filter(pl.col("reason") == "name_collision")
    rows += [{"names": detail, "differ_in": "Unicode form"} for detail in forms["detail"]]
    if not rows:
        return Outcome(True, f"{counted(len(table), 'name')}, distinct in any case and Unicode form")
    groups = counted(len(rows), "group of names differs", "groups of names differ")
    summary = f"{groups} only in case or Unicode form, such as {rows[0]['names']}"
    return Outcome(False, summary, "rename one of each group", rows)


def _folded(names: pl.Series) -> pl.Series:
    """The names as a file system without cases and with one Unicode form has them."""
    if (names.str.len_bytes() == names.str.len_chars()).all():
        return names.str.to_lowercase()
    folded = [unicodedata.normalize("NFC", name.casefold()) for name in names]
    return pl.Series(folded, dtype=pl.String)


def _conservation(table: pl.DataFrame, rejected: pl.DataFrame, report: Report) -> Outcome:
    both = rejected["sample_id"].filter(rejected["sample_id"].is_in(table["sample_id"].implode())).unique()
    rows = [{"sample_id": sample_id, "problem": "kept and rejected"} for sample_id in both.sort()]
    num_in = report.get("in", len(table) + len(rejected))
    numbers = {"in": num_in, "kept": len(table), "rejected": len(rejected)}
    summary = f"{num_in:,} found = {len(table):,} kept + {len(rejected):,} rejected"
    if not rows and num_in == len(table) + len(rejected):
        return Outcome(True, summary, numbers=numbers)
    summary = f"{summary.replace('=', 'is not')}; {len(both):,} both kept and rejected"
    return Outcome(False, summary, "materialize raw_images again", rows, numbers)


def _shape_uniformity(table: pl.DataFrame) -> Outcome:
    sound = (pl.col("height") > 0) & (pl.col("width") > 0) & pl.col("channels").is_between(1, 4)
    wrong = table.filter(~sound).select("sample_id", "height", "width", "channels", "mode")
    modes = dict(table.group_by("mode").len().sort("mode").rows())
    if wrong.is_empty():
        summary = f"{counted(len(table), 'image')}, each of a readable size and with known channels"
        return Outcome(True, summary, numbers={"modes": modes})
    summary = (
        counted(len(wrong), "image has", "images have") + " no size, or channels that are none of 1 to 4"
    )
    return Outcome(False, summary, "export these images again", wrong.rows(named=True), {"modes": modes})


def _file_size_outliers(table: pl.DataFrame) -> Outcome:
    """Bytes a pixel within one dataset and format: a PNG is no outlier among JPEGs for being one."""
    density = table.select(
        *("sample_id", "dataset", "format"),
        bytes_per_pixel=pl.col("file_bytes") / (pl.col("height").cast(pl.Int64) * pl.col("width")),
    )
    rows: list[dict[str, Any]] = []
    num_judged = 0
    for group in density.partition_by("dataset", "format"):
        found = outliers(group["bytes_per_pixel"].to_numpy())
        num_judged += len(group) if found.judged else 0
        for row in group.filter(pl.Series(found.mask)).iter_rows(named=True):
            far = {"bytes_per_pixel": round(row["bytes_per_pixel"], 4), "median": round(found.median, 4)}
            rows.append({"sample_id": row["sample_id"], "format": row["format"], **far})
    numbers = {"judged": num_judged, "not_judged": len(table) - num_judged}
    if not rows:
        summary = f"no outlier in bytes a pixel among {counted(num_judged, 'image')}"
        summary += f"; too few of their format to judge: {numbers['not_judged']:,}"
        return Outcome(True, summary, numbers=numbers)
    summary = counted(len(rows), "image has", "images have")
    summary += " far more or fewer bytes a pixel than the others of that format"
    fix = "look at them: few bytes are often blank or upscaled pictures, many are noise or no photographs"
    return Outcome(False, summary, fix, rows, numbers)


def _oddities(table: pl.DataFrame, report: Report) -> Outcome:
    """What is used or passed over all the same, and may be a mistake."""
    named_so = [f"{kind} {suffix}" for kind, suffixes in _SUFFIXES.items() for suffix in suffixes]
    suffix = pl.col("sample_id").str.extract(_SUFFIX).fill_null("").str.to_lowercase()
    wrong = table.filter(~pl.format("{} {}", "format", suffix).is_in(named_so))
    rows = [
        {"what": "wrong suffix", "path": sample_id, "detail": f"its content is {kind}"}
        for sample_id, kind in wrong.select("sample_id", "format").iter_rows()
    ]
    animated = table.filter(pl.col("notes").str.split(" ").list.contains("animated"))
    rows += [
        {"what": "animated", "path": sample_id, "detail": "only the first frame is used"}
        for sample_id in animated["sample_id"]
    ]
    kinds = {
        "links_out": ("leads out", "a link that leads out of the dataset"),
        "foreign_caches": ("foreign cache", "passed over: it looks like another trainer's cache"),
        "captions_without_image": ("lonely caption", "a caption file without an image"),
    }
    for kind, (what, detail) in kinds.items():
        named = report.get("named", {}).get(kind, [])
        rows += [{"what": what, "path": path, "detail": detail} for path in named]
    numbers = {
        "wrong_suffix": sum(row["what"] == "wrong suffix" for row in rows),
        "animated": len(animated),
        "converted_from_profile": int(table["notes"].str.contains("colour_profile").sum()),
        **{kind: report.get(kind, 0) for kind in kinds},
    }
    if not rows:
        return Outcome(True, "nothing odd lies in the datasets", numbers=numbers)
    one = {"captions_without_image": "caption without image", "foreign_caches": "foreign cache"}
    counts = _counts(
        {
            (one.get(kind, kind) if count == 1 else kind).replace("_", " "): count
            for kind, count in numbers.items()
            if count
        }
    )
    fix = "look whether these are meant; nothing needs to be done for training"
    return Outcome(False, f"worth a look: {counts}", fix, rows, numbers)
