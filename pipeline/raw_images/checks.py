"""Checks of raw_images: images were found, their names are distinct, and every file is accounted for.

To add a check, such as a gate on file formats: write a function that returns an `Outcome`, add it to `run`
and its columns to `_COLUMNS`, and declare it under the same name in `pipeline/recipe/check_specs.py`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

import polars as pl

from pipeline.errors import counted
from pipeline.escaping import without_secrets
from pipeline.reporting.findings import CheckContext, Finding, Outcome, findings
from pipeline.reporting.outliers import outliers
from pipeline.reporting.rejections import most_frequent_first, most_frequent_fixes
from pipeline.reporting.reports import Report

STAGE = "raw_images"

_FORMAT_SUFFIXES = {
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
"""Usual file name suffixes of each format."""

_LAST_SUFFIX = r"[^/]\.([^./]+)$"
"""The last suffix of a path, without its dot; a dot file such as `.png` has none."""

_COLUMNS = (
    *("sample_id", "dataset", "height", "width", "file_bytes"),
    *("format", "mode", "channels", "notes"),
)
"""Columns of raw_images that the checks need."""


def run(context: CheckContext) -> list[Finding]:
    """Return one finding per check of raw_images, from its table, its rejected rows and its report."""
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
    num_kept = dict(table.group_by("dataset").len().rows())
    numbers = {"images": len(table)}
    empty_datasets = [settings for settings in context.recipe.datasets if not num_kept.get(settings.name)]
    if not empty_datasets:
        summary = f"{counted(len(table), 'image')} in {counted(len(num_kept), 'dataset')}"
        return Outcome(True, summary, numbers=numbers)

    # The table may be older than the recipe: a check can run without its asset.
    reports = report.get("datasets", {})
    rows = [
        {
            "dataset": each.name,
            "searched": without_secrets(str(context.recipe.written_path(each))),
            **_empty_dataset_numbers(each.name, rejected, reports.get(each.name, {})),
        }
        for each in empty_datasets
    ]
    name = empty_datasets[0].name
    if reports and name not in reports:
        summary = f"dataset {name} has no images: it was added to the recipe after the last scan"
        return Outcome(False, summary, "run the cache job, which scans it", rows, numbers)

    summary = f"dataset {name} has no images: searched {rows[0]['searched']} and its subfolders"
    in_dataset = rejected.filter(pl.col("dataset") == name)
    if len(in_dataset):
        by_reason = in_dataset.group_by("reason").len().sort("len", "reason", descending=[True, False])
        counts = _format_counts({reason.replace("_", " "): count for reason, count in by_reason.rows()})
        path, detail = most_frequent_first(in_dataset).select("path", "detail").row(0)
        summary += f"; all files were rejected: {counts}; {path}: {detail}"
        return Outcome(False, summary, most_frequent_fixes(in_dataset), rows, numbers)

    summary += f"; ignored: {rows[0]['passed_over'] or 'nothing, the folder is empty'}"
    summary += f"; other suffixes: {rows[0]['other_suffixes']}" if rows[0]["other_suffixes"] else ""
    fix = "correct datasets[].path, or add images; folders with a leading dot are not searched"
    return Outcome(False, summary, fix, rows, numbers)


def _empty_dataset_numbers(name: str, rejected: pl.DataFrame, report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rejected": len(rejected.filter(pl.col("dataset") == name)),
        "passed_over": _format_counts(report.get("passed_over", {})),
        "other_suffixes": _format_counts(report.get("suffixes_of_no_images", {})),
    }


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name or '(none)'}" for name, count in counts.items())


def _names_distinct(table: pl.DataFrame, rejected: pl.DataFrame) -> Outcome:
    # Such names are equal on a file system that ignores case or Unicode form (FAILURES I17).
    folded = [unicodedata.normalize("NFC", name.casefold()) for name in table["sample_id"]]
    groups = (
        table.select(name="sample_id", folded=pl.Series(folded, dtype=pl.String))
        .group_by("folded", maintain_order=True)
        .agg(pl.col("name").sort())
        .filter(pl.col("name").list.len() > 1)
    )
    rows = [{"names": " | ".join(names), "differ_in": "case"} for names in groups["name"]]
    collisions = rejected.filter(pl.col("reason") == "name_collision")
    rows += [{"names": detail, "differ_in": "Unicode form"} for detail in collisions["detail"]]
    if not rows:
        return Outcome(True, f"{counted(len(table), 'name')}, distinct in any case and Unicode form")

    num_groups = counted(len(rows), "group of names differs", "groups of names differ")
    summary = f"{num_groups} only in case or Unicode form, such as {rows[0]['names']}"
    return Outcome(False, summary, "rename all but one file of each group", rows)


def _conservation(table: pl.DataFrame, rejected: pl.DataFrame, report: Report) -> Outcome:
    both = rejected.join(table, on="sample_id", how="semi")["sample_id"].unique().sort()
    rows = [{"sample_id": sample_id, "problem": "kept and rejected"} for sample_id in both]
    num_in = report.get("in", len(table) + len(rejected))
    numbers = {"in": num_in, "kept": len(table), "rejected": len(rejected)}
    if not rows and num_in == len(table) + len(rejected):
        summary = f"{num_in:,} found = {len(table):,} kept + {len(rejected):,} rejected"
        return Outcome(True, summary, numbers=numbers)

    summary = (
        f"{num_in:,} found is not {len(table):,} kept + {len(rejected):,} rejected; "
        f"{len(both):,} both kept and rejected"
    )
    return Outcome(
        False,
        summary,
        "start the job again; if the problem returns, report a bug and attach the table",
        rows,
        numbers,
    )


def _shape_uniformity(table: pl.DataFrame) -> Outcome:
    is_valid = (pl.col("height") > 0) & (pl.col("width") > 0) & pl.col("channels").is_between(1, 4)
    invalid = table.filter(~is_valid).select("sample_id", "height", "width", "channels", "mode")
    modes = dict(table.group_by("mode").len().sort("mode").rows())
    if invalid.is_empty():
        summary = f"{counted(len(table), 'image')}, all with a readable size and 1 to 4 channels"
        return Outcome(True, summary, numbers={"modes": modes})

    images = counted(len(invalid), "image has", "images have")
    summary = f"{images} no size, or a number of channels outside 1 to 4"
    return Outcome(False, summary, "export these images again", invalid.rows(named=True), {"modes": modes})


def _file_size_outliers(table: pl.DataFrame) -> Outcome:
    sized = table.filter(pl.col("file_bytes") > 0, pl.col("height") > 0, pl.col("width") > 0)
    densities = sized.select(
        *("sample_id", "dataset", "format"),
        bytes_per_pixel=pl.col("file_bytes") / (pl.col("height").cast(pl.Int64) * pl.col("width")),
    )
    rows: list[dict[str, Any]] = []
    num_judged = 0

    # Formats differ in density, so an image is compared with images of the same format.
    for group in densities.partition_by("dataset", "format"):
        result = outliers(group["bytes_per_pixel"].to_numpy())
        num_judged += len(group) if result.judged else 0
        for sample_id, image_format, density in (
            group.filter(pl.Series(result.mask)).select("sample_id", "format", "bytes_per_pixel").rows()
        ):
            numbers = {"bytes_per_pixel": round(density, 4), "median": round(result.median, 4)}
            rows.append({"sample_id": sample_id, "format": image_format, **numbers})

    numbers = {"judged": num_judged, "not_judged": len(table) - num_judged}
    if not rows:
        summary = f"no outlier in bytes per pixel among {counted(num_judged, 'image')}"
        summary += f"; too few of the same format to judge: {numbers['not_judged']:,}"
        return Outcome(True, summary, numbers=numbers)

    images = counted(len(rows), "image has", "images have")
    summary = f"{images} far more or fewer bytes per pixel than most images of the same format"
    fix = (
        "check them: few bytes often mean a blank or upscaled picture, many bytes mean noise or a drawing "
        "saved as a photograph"
    )
    return Outcome(False, summary, fix, rows, numbers)


def _oddities(table: pl.DataFrame, report: Report) -> Outcome:
    usual = [f"{name} {suffix}" for name, suffixes in _FORMAT_SUFFIXES.items() for suffix in suffixes]
    suffix = pl.col("sample_id").str.extract(_LAST_SUFFIX).fill_null("").str.to_lowercase()
    misnamed = table.filter(~pl.format("{} {}", "format", suffix).is_in(usual))
    animated = table.filter(pl.col("notes").str.split(" ").list.contains("animated"))
    rows = [
        *(
            {"what": "wrong suffix", "path": sample_id, "detail": f"its content is {image_format}"}
            for sample_id, image_format in misnamed.select("sample_id", "format").rows()
        ),
        *(
            {"what": "animated", "path": sample_id, "detail": "only the first frame is used"}
            for sample_id in animated["sample_id"]
        ),
    ]

    kinds = {
        "links_out": ("leads out", "a link that leads out of the dataset"),
        "foreign_caches": ("foreign cache", "ignored: probably another trainer's cache"),
        "captions_without_image": ("lonely caption", "a caption file without an image"),
    }
    for kind, (what, detail) in kinds.items():
        paths = report.get("named", {}).get(kind, [])
        rows += [{"what": what, "path": path, "detail": detail} for path in paths]

    numbers = {
        "wrong_suffix": len(misnamed),
        "animated": len(animated),
        "converted_from_profile": int(table["notes"].str.contains("colour_profile").sum()),
        **{kind: report.get(kind, 0) for kind in kinds},
    }
    if not rows:
        return Outcome(True, "the datasets contain nothing unusual", numbers=numbers)
    singular = {"captions_without_image": "caption without image", "foreign_caches": "foreign cache"}
    counts = {
        (singular.get(kind, kind) if count == 1 else kind).replace("_", " "): count
        for kind, count in numbers.items()
        if count
    }
    fix = "check whether these are intended; training does not need a change"
    return Outcome(False, f"unusual files: {_format_counts(counts)}", fix, rows, numbers)
