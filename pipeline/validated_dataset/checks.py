"""Checks of validated_dataset: captions, the rejected fraction, duplicates, and changed files.

To add a check, such as a gate on caption length: write a function here that returns an `Outcome`, and add
it to `outcomes` in `run` and the columns that it reads to `_COLUMNS`. Declare the check under the same name
in `pipeline/recipe/check_specs.py`, and a threshold in the `checks` section of `pipeline/recipe/schema.py`.
Then generate the pages that list all checks (CONTRIBUTING.md).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import counted, verb
from pipeline.images.decode import File, open_content
from pipeline.images.formats import ImageError
from pipeline.raw_images.scan_index import SIDECAR, STAT
from pipeline.raw_images.sources import sources_of
from pipeline.reporting.findings import CheckContext, Finding, Outcome, findings
from pipeline.reporting.rejections import (
    REJECTED_COLUMNS,
    check_conservation,
    most_frequent_first,
    most_frequent_fixes,
    no_samples_left,
)
from pipeline.storage.needed_columns import SIDE_INPUT_HASHES
from pipeline.storage.source import Source
from pipeline.storage.table_columns import PICTURE_COLUMNS
from pipeline.storage.tables import DUPLICATE
from pipeline.storage.tables.schemas import has_defect
from pipeline.validated_dataset.caption_checks import caption_outcomes
from pipeline.validated_dataset.caption_phrases import contradiction
from pipeline.validated_dataset.captions import FALLBACK
from pipeline.validated_dataset.holdout import held_out
from pipeline.validated_dataset.picture_checks import picture_outcomes
from pipeline.validated_dataset.side_input_checks import side_input_outcomes, white_masks

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

STAGE = "validated_dataset"

_RAW_COLUMNS = ("sample_id", "dataset", "path", "content_hash", "height", "width", *STAT)
"""Columns of raw_images that the checks need."""

_COLUMNS = (
    *("sample_id", "dataset", "content_hash", "height", "width"),
    *("duplicate_group", "one_colour", "mask_mean", *SIDE_INPUT_HASHES),
    *("caption", "more_captions", "caption_from", "focus_x", "focus_y", *PICTURE_COLUMNS),
)
"""Columns of validated_dataset that the checks need."""

# The perceptual hash ignores colours: photographs of a red and a blue cup may have the same.
MAX_COLOUR_DIFFERENCE = 40
"""Largest difference of mean colours, in levels, of images for which captions must agree."""

_MIXED_SIDES = 2
"""Number of sides of the validation split that a leaking group is on."""


def run(context: CheckContext) -> list[Finding]:
    """Return one finding per check of validated_dataset, from its tables and the image files.

    Raises:
        TableError: There is no table of raw_images or validated_dataset.
    """
    raw = context.tables.read("raw_images", _RAW_COLUMNS)
    table = context.tables.read(STAGE, _COLUMNS)
    rejected = context.tables.read_rejected(STAGE)

    outcomes = {
        "captions_present": _captions_present(table, rejected),
        "captions_decodable": _captions_decodable(table, rejected),
        "captions_unshared": _captions_unshared(table),
        **side_input_outcomes(context, table, rejected),
        "masks_white": white_masks(context.recipe, table),
        "rejected_fraction": _rejected_fraction(context, table, rejected),
        "conservation": check_conservation(
            raw["sample_id"], table["sample_id"], rejected["sample_id"], STAGE
        ),
        "shape_uniformity": _shape_uniformity(raw, table, rejected),
        "file_size_outliers": _file_size_outliers(context, raw, table, rejected),
        "validation_apart": _validation_apart(context.recipe, table),
        "captions_agree": _captions_agree(context),
        "edits_matched": _edits_matched(context),
        **caption_outcomes(context.recipe, table),
        "look_alikes": _look_alikes(context.recipe, table, rejected),
        "look_alikes_agree": _look_alikes_agree(context.recipe, table),
        "one_colour": _one_colour(table),
        **picture_outcomes(context.recipe, table),
    }
    return findings(context, STAGE, outcomes)


def _captions_present(table: pl.DataFrame, rejected: pl.DataFrame) -> Outcome:
    missing = _with_reason(rejected, "caption_missing", "caption_empty")
    if missing.is_empty():
        num_fallback = int((table["caption_from"] == FALLBACK).sum())
        numbers = {"from_fallback": num_fallback}
        summary = f"{counted(len(table), 'sample')}, all with a caption"
        summary += f"; {num_fallback:,} from captions.fallback" if num_fallback else ""
        return Outcome(True, summary, numbers=numbers)
    return _caption_failure(f"{counted(len(missing), 'image has', 'images have')} no caption", missing)


def _captions_decodable(table: pl.DataFrame, rejected: pl.DataFrame) -> Outcome:
    undecodable = _with_reason(
        rejected, "caption_undecodable", "caption_unreadable", "caption_outside_dataset"
    )
    if undecodable.is_empty():
        return Outcome(True, f"{counted(len(table), 'caption')}, all readable")
    return _caption_failure(f"{counted(len(undecodable), 'caption')} cannot be decoded", undecodable)


def _caption_failure(summary: str, rejected: pl.DataFrame) -> Outcome:
    rows = _rows(rejected)
    summary += f"; {rows[0]['sample_id']}: {rows[0]['detail']}"
    return Outcome(False, summary, most_frequent_fixes(rejected), rows)


def _with_reason(rejected: pl.DataFrame, *reasons: str) -> pl.DataFrame:
    return rejected.filter(pl.col("reason").is_in(reasons))


def _rows(rejected: pl.DataFrame) -> list[dict[str, Any]]:
    return most_frequent_first(rejected).select(REJECTED_COLUMNS).rows(named=True)


def _captions_unshared(table: pl.DataFrame) -> Outcome:
    # `a.jpg` and `a.png` both belong to `a.txt`. One of them then trains on the wrong caption.
    shared = (
        table.filter(pl.col("caption_from").str.starts_with(SIDECAR))
        .group_by("dataset", "caption_from")
        .agg(pl.col("sample_id").sort())
        .filter(pl.col("sample_id").list.len() > 1)
        .sort("dataset", "caption_from")
    )
    rows = [
        {"caption": f"{dataset}/{caption_from.removeprefix(SIDECAR)}", "images": " | ".join(ids)}
        for dataset, caption_from, ids in shared.rows()
    ]
    if not rows:
        return Outcome(True, "no two images share a caption file")
    files = counted(len(rows), "caption file belongs", "caption files belong")
    summary = f"{files} to several images: {rows[0]['caption']} to {rows[0]['images']}"
    return Outcome(False, summary, "rename the images so that their names differ before the suffix", rows)


def _captions_agree(context: CheckContext) -> Outcome:
    """Report images with different captions in two files. Reports of older versions do not count them."""
    report = context.report(STAGE) or {}
    number, rows = report.get("caption_conflicts", 0), report.get("named", {}).get("caption_conflicts", [])
    if not number:
        return Outcome(True, "no image has different captions in two files")

    images = counted(number, "image has", "images have")
    first = rows[0]
    summary = (
        f"{images} different captions in two files: {first['sample_id']} uses {first['used']}, not "
        f"{first['not_used']}"
    )
    fix = "delete the file that is out of date, or change the order in captions.suffix"
    return Outcome(False, summary, fix, rows, {"caption_conflicts": number})


def _edits_matched(context: CheckContext) -> Outcome:
    report = context.report(STAGE) or {}
    number, paths = report.get("unmatched_edits", 0), report.get("named", {}).get("unmatched_edits", [])
    if not number:
        return Outcome(True, "each edited caption belongs to an image")
    files = counted(number, "edited caption belongs", "edited captions belong")
    fix = "rename the file to captions/<sample id>.txt, or delete it"
    rows = [{"file": path} for path in paths]
    summary = f"{files} to no image, first {paths[0]}"
    return Outcome(False, summary, fix, rows, {"unmatched_edits": number})


def _rejected_fraction(context: CheckContext, table: pl.DataFrame, rejected: pl.DataFrame) -> Outcome:
    """Limit the fraction that this stage and the scan rejected; filters, limits and copies do not count."""
    # The scan's rejections count too: a user sees one dataset, and not two stages.
    rejected_so_far = pl.concat([context.tables.read_rejected("raw_images"), rejected])
    if table.is_empty():
        return no_samples_left(rejected_so_far, "add images to the folders in datasets[].path")

    counting = rejected_so_far.filter(has_defect())
    total = len(table) + len(counting)
    fraction = len(counting) / total if total else 0.0
    limit = context.recipe.checks.max_rejected_fraction
    numbers = {"rejected": len(counting), "of": total, "fraction": round(fraction, 6), "limit": limit}

    by_reason = counting.group_by("reason").len().sort("len", "reason", descending=[True, False])
    counts = ", ".join(f"{count:,} {reason}" for reason, count in by_reason.rows())
    summary = (
        f"{len(counting):,} of {counted(total, 'image')} {verb(len(counting), 'is', 'are')} rejected "
        f"({fraction:.1%}, the limit is {limit:.1%})"
    )
    summary += f": {counts}" if counts else ""
    if fraction <= limit:
        return Outcome(True, summary, numbers=numbers)
    fix = most_frequent_fixes(counting, otherwise="or raise checks.max_rejected_fraction")
    return Outcome(False, summary, fix, _rows(counting), numbers)


def _shape_uniformity(raw: pl.DataFrame, table: pl.DataFrame, rejected: pl.DataFrame) -> Outcome:
    rows = _rows(_with_reason(rejected, "size_disagrees"))
    scanned = raw.select("sample_id", scanned_height="height", scanned_width="width")
    sizes = table.select("sample_id", "height", "width").join(
        scanned, on="sample_id", how="left", maintain_order="left"
    )
    is_same = (pl.col("height") == pl.col("scanned_height")) & (pl.col("width") == pl.col("scanned_width"))
    rows += sizes.filter(~is_same.fill_null(value=False)).rows(named=True)
    if not rows:
        summary = f"{counted(len(table), 'image')}, all decoding to the size that the scan recorded"
        return Outcome(True, summary)
    images = counted(len(rows), "image decodes", "images decode")
    summary = f"{images} to another size than recorded, first {rows[0]['sample_id']}"
    return Outcome(False, summary, "export these images again, or remove them", rows)


def _file_size_outliers(
    context: CheckContext, raw: pl.DataFrame, table: pl.DataFrame, rejected: pl.DataFrame
) -> Outcome:
    """Check that each kept file is still the file of the scan, and count the rejected bytes."""
    # A training from a complete cache may run where the datasets do not exist.
    if not context.sources:
        return Outcome(True, "skipped: this run does not read the datasets")

    rows = _rows(_with_reason(rejected, "changed", "vanished"))
    sources = sources_of(context.recipe)
    kept = raw.join(table.select("sample_id"), on="sample_id", how="semi", maintain_order="left")
    for settings in context.recipe.datasets:
        in_dataset = kept.filter(pl.col("dataset") == settings.name)
        rows += _changed_files(sources[settings.name], in_dataset)
    datasets = [settings.name for settings in context.recipe.datasets]
    # No source lists files of a dataset that the recipe no longer has.
    for sample_id in kept.filter(~pl.col("dataset").is_in(datasets))["sample_id"]:
        rows.append({"sample_id": sample_id, "reason": "vanished: its dataset was removed from the recipe"})

    rejected_bytes = raw.join(rejected, on="sample_id", how="semi")["file_bytes"].sum()
    numbers = {"kept_bytes": int(kept["file_bytes"].sum()), "rejected_bytes": int(rejected_bytes)}
    if not rows:
        summary = f"none of {counted(len(table), 'file')} has changed since the scan"
        summary += f"; {counted(numbers['rejected_bytes'], 'byte')} rejected"
        return Outcome(True, summary, numbers=numbers)
    summary = f"{counted(len(rows), 'file')} changed or vanished since the scan, first {rows[0]['sample_id']}"
    return Outcome(False, summary, "start the job again when the files no longer change", rows, numbers)


def _changed_files(source: Source, rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the changed files of one dataset. A new time or version with the old content is not a change."""
    stats = source.stats(rows["path"].to_list())
    current = rows.select("sample_id").hstack(pl.DataFrame(stats, schema=list(STAT)))

    # Sources differ in which parts of a stat are reliable; an address has no inode.
    compared = ["sample_id", *(STAT[column] for column in source.compared_columns)]
    touched = rows.join(current, on=compared, how="anti", maintain_order="left").join(
        current.select("sample_id", current_bytes="file_bytes"), on="sample_id", maintain_order="left"
    )
    changes = (
        {"sample_id": row["sample_id"], "reason": _change(source.file(row["path"]), row)}
        for row in touched.iter_rows(named=True)
    )
    return [change for change in changes if change["reason"]]


def _change(file: File, row: dict[str, Any]) -> str | None:
    # The size is known without opening the file. Only a file of the same size is hashed.
    num_bytes = row["current_bytes"]
    if num_bytes >= 0 and num_bytes != row["file_bytes"]:
        return f"changed: {counted(num_bytes, 'byte')}, {row['file_bytes']:,} at the scan"
    try:
        with open_content(file, row["content_hash"]):
            return None
    except ImageError as err:
        is_changed = err.reason == "changed"
        return "changed: the same number of bytes, but other content" if is_changed else str(err)


def _validation_apart(recipe: Recipe, table: pl.DataFrame) -> Outcome:
    """Check that no content and no group of similar images is on both sides of the split (FAILURES I24)."""
    fractions = {each.name: each.validation_fraction for each in recipe.datasets}
    if not any(fractions.values()):
        return Outcome(True, "no image is held out for validation")

    # The split is computed again here, so that the check covers the function that training calls.
    split = table.with_columns(held_out=held_out(table, fractions))
    sides = pl.concat(
        split.group_by(same=name).agg(pl.col("held_out").n_unique(), pl.col("sample_id").sort())
        for name in ("content_hash", "duplicate_group")
    )
    leaks = sides.filter(pl.col("held_out") == _MIXED_SIDES).unique("sample_id").sort("same")
    num_held_out = int(split["held_out"].sum())
    numbers = {"held_out": num_held_out, "trained": len(table) - num_held_out, "leaks": len(leaks)}
    if leaks.is_empty():
        images = counted(len(table), "image")
        summary = f"{num_held_out:,} of {images} held out, none similar to a training image"
        return Outcome(True, summary, numbers=numbers)
    rows = [{"images": " | ".join(ids)} for ids in leaks["sample_id"]]
    groups = counted(len(rows), "group is", "groups are")
    summary = f"{groups} both trained on and held out: {rows[0]['images']}"
    return Outcome(
        False,
        summary,
        "start the job again; if the problem returns, report a bug and attach the table",
        rows,
        numbers,
    )


def _look_alikes(recipe: Recipe, table: pl.DataFrame, rejected: pl.DataFrame) -> Outcome:
    # Copies are already rejected; similar images stay, because the user must decide about them.
    copies = _rows(_with_reason(rejected, DUPLICATE))
    groups = (
        table.group_by("duplicate_group")
        .agg(pl.col("sample_id").sort(), same_bytes=pl.col("content_hash").n_unique() == 1)
        .filter(pl.col("sample_id").list.len() > 1)
        .sort(pl.col("sample_id").list.len(), "duplicate_group", descending=[True, False])
    )
    num_similar = int(groups["sample_id"].list.len().sum())
    numbers = {"copies_left_out": len(copies), "groups": len(groups), "images_in_groups": num_similar}
    numbers["near_duplicate_bits"] = recipe.checks.near_duplicate_bits
    if not copies and groups.is_empty():
        return Outcome(True, "no two images are similar", numbers=numbers)

    rows = [
        {"what": "same bytes" if same_bytes else "look alike", "images": " | ".join(ids)}
        for _, ids, same_bytes in groups.rows()
    ]
    rows += [{"what": "copy, left out", "images": row["sample_id"], "of": row["detail"]} for row in copies]
    num_groups = counted(len(groups), "group")
    summary = (
        f"removed copies: {len(copies):,}; similar images: {num_similar:,} in {num_groups}; "
        f"first: {rows[0]['images']}"
    )
    fix = "keep the best of each group, or accept that training shows such a picture more often than others"
    return Outcome(False, summary, fix, rows, numbers)


def _look_alikes_agree(recipe: Recipe, table: pl.DataFrame) -> Outcome:
    # Captions of edits are instructions, and the two datasets of a slider are opposites.
    same = ["dataset", "duplicate_group"]
    datasets = [each.name for each in recipe.datasets if not each.references]
    described = table.filter(pl.col("dataset").is_in(datasets))
    groups = described.filter(pl.struct(same).is_duplicated()).sort(*same, "sample_id")
    rows: list[dict[str, Any]] = []
    for group in groups.partition_by(same, maintain_order=True):
        # Each with the next: thousands of frames of a video would have millions of pairs.
        for one, other in pairwise(group.rows(named=True)):
            conflict = contradiction(one["caption"], other["caption"])
            if conflict and _colours_differ_by(one, other) <= MAX_COLOUR_DIFFERENCE:
                rows.append({"images": f"{one['sample_id']} | {other['sample_id']}", "conflict": conflict})
    numbers = {"contradictions": len(rows)}
    if not rows:
        return Outcome(True, "no two similar images have contradicting captions", numbers=numbers)
    pairs = counted(len(rows), "pair of similar images has", "pairs of similar images have")
    summary = f"{pairs} contradicting captions: {rows[0]['images']} ({rows[0]['conflict']})"
    fix = "correct the wrong caption of each pair, or remove one of the two images"
    return Outcome(False, summary, fix, rows, numbers)


def _colours_differ_by(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Return the largest difference of a level in the mean colours; 0 in tables of older releases."""
    levels = zip(*(bytes.fromhex(each.get("colours") or "") for each in (one, other)), strict=False)
    return max((abs(mine - others) for mine, others in levels), default=0)


def _one_colour(table: pl.DataFrame) -> Outcome:
    rows = table.filter("one_colour").select("sample_id", "height", "width").rows(named=True)
    numbers = {"one_colour": len(rows)}
    if not rows:
        return Outcome(True, "every image has more than one colour", numbers=numbers)
    images = counted(len(rows), "image has", "images have")
    summary = f"{images} a single colour, first {rows[0]['sample_id']}"
    fix = "remove them: they are usually placeholders or failed downloads"
    return Outcome(False, summary, fix, rows, numbers)
