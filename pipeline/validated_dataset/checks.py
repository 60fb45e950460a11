"""The checks of validated_dataset: captions, the share of rejected samples, and nothing lost or changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from pipeline.checks.findings import CheckContext, Finding, Outcome, findings
from pipeline.checks.rejections import (
    REJECTED_COLUMNS,
    check_conservation,
    most_frequent_first,
    most_frequent_fixes,
    no_samples_left,
)
from pipeline.errors import counted, verb
from pipeline.images.decode import File, hash_bytes, read_bytes
from pipeline.images.formats import ImageError
from pipeline.storage.source import Source, source_at
from pipeline.storage.tables import DUPLICATE, not_asked_for, only
from pipeline.validated_dataset.holdout import held_out

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

STAGE = "validated_dataset"

_AT_ONCE = 5_000
"""Files whose stats are in memory at a time."""

_SCANNED = (
    *("sample_id", "dataset", "path", "content_hash", "height", "width"),
    *("file_bytes", "mtime_ns", "ctime_ns", "inode"),
)
"""Of raw_images, what is looked at here."""

_COLUMNS = (
    *("sample_id", "dataset", "content_hash", "height", "width"),
    *("duplicate_group", "one_colour", "caption_from"),
)
"""Of validated_dataset, likewise."""


def run(context: CheckContext) -> list[Finding]:
    """One finding for each check of validated_dataset, from its table, its rejected rows and the files.

    Raises:
        TableError: There is no table of raw_images or validated_dataset.
    """
    raw = context.tables.read("raw_images", _SCANNED)
    table = context.tables.read(STAGE, _COLUMNS)
    rejected = context.tables.read_rejected(STAGE)
    outcomes = {
        "captions_present": _captions_present(table, rejected),
        "captions_decodable": _captions_decodable(table, rejected),
        "captions_unshared": _captions_unshared(table),
        "rejected_fraction": _rejected_fraction(context, table, rejected),
        "conservation": check_conservation(
            raw["sample_id"], table["sample_id"], rejected["sample_id"], STAGE
        ),
        "shape_uniformity": _shape_uniformity(raw, table, rejected),
        "file_size_outliers": _file_size_outliers(context, raw, table, rejected),
        "validation_apart": _validation_apart(context.recipe, table),
        "look_alikes": _look_alikes(context.recipe, table, rejected),
        "one_colour": _one_colour(table),
    }
    return findings(context, STAGE, outcomes)


def _captions_present(table: pl.DataFrame, rejected: pl.DataFrame) -> Outcome:
    bare = _rejected_for(rejected, "caption_missing", "caption_empty")
    if bare.is_empty():
        return Outcome(True, f"each of {counted(len(table), 'sample')} has a caption")
    rows = _shown(bare)
    bare_images = counted(len(rows), "image has", "images have")
    summary = f"{bare_images} no caption; {rows[0]['sample_id']}: {rows[0]['detail']}"
    return Outcome(False, summary, most_frequent_fixes(bare), rows)


def _captions_decodable(table: pl.DataFrame, rejected: pl.DataFrame) -> Outcome:
    broken = _rejected_for(rejected, "caption_undecodable", "caption_unreadable")
    if broken.is_empty():
        return Outcome(True, f"each of {counted(len(table), 'caption')} decodes")
    rows = _shown(broken)
    captions = counted(len(rows), "caption does", "captions do")
    summary = f"{captions} not decode; {rows[0]['sample_id']}: {rows[0]['detail']}"
    return Outcome(False, summary, most_frequent_fixes(broken), rows)


def _rejected_for(rejected: pl.DataFrame, *reasons: str) -> pl.DataFrame:
    return rejected.filter(pl.col("reason").is_in(reasons))


def _shown(rejected: pl.DataFrame) -> list[dict[str, Any]]:
    return most_frequent_first(rejected).select(REJECTED_COLUMNS).rows(named=True)


def _captions_unshared(table: pl.DataFrame) -> Outcome:
    # Few are alike in 64 bits; those are compared whole.
    alike = table.select("sample_id", "dataset", "caption_from").filter(
        pl.col("caption_from").hash().is_duplicated()
    )
    sidecars = alike.filter(pl.col("caption_from").str.starts_with("sidecar:"))
    shared = (
        sidecars.group_by("dataset", "caption_from")
        .agg(pl.col("sample_id").sort())
        .filter(pl.col("sample_id").list.len() > 1)
        .sort("dataset", "caption_from")
    )
    rows = [
        {"caption": f"{dataset}/{source.removeprefix('sidecar:')}", "images": " | ".join(ids)}
        for dataset, source, ids in shared.iter_rows()
    ]
    if not rows:
        return Outcome(True, "no two images share a caption file")
    files = counted(len(rows), "caption file belongs", "caption files belong")
    summary = f"{files} to several images: {rows[0]['caption']} to {rows[0]['images']}"
    return Outcome(False, summary, "rename the images so that each has a name of its own", rows)


def _rejected_fraction(context: CheckContext, table: pl.DataFrame, rejected: pl.DataFrame) -> Outcome:
    """Of all that was found, the share that this stage and the scan rejected."""
    left_out = pl.concat([context.tables.read_rejected("raw_images"), rejected])
    if table.is_empty():
        return no_samples_left(left_out, "put images into the folders that datasets[].path name")
    everything = left_out.filter(not_asked_for())
    total = len(table) + len(everything)
    fraction = len(everything) / total if total else 0.0
    limit = context.recipe.checks.max_rejected_fraction
    reasons = everything.group_by("reason").len().sort("len", "reason", descending=[True, False])
    numbers = {"rejected": len(everything), "of": total, "fraction": round(fraction, 6), "limit": limit}
    told = ", ".join(f"{count:,} {reason}" for reason, count in reasons.iter_rows())
    summary = (
        f"{len(everything):,} of {counted(total, 'image')} {verb(len(everything), 'is', 'are')} rejected "
        f"({fraction:.1%}, the limit is {limit:.1%})"
    )
    summary += f": {told}" if told else ""
    if fraction <= limit:
        return Outcome(True, summary, numbers=numbers)
    fix = most_frequent_fixes(everything, otherwise="or raise checks.max_rejected_fraction")
    return Outcome(False, summary, fix, _shown(everything), numbers)


def _shape_uniformity(raw: pl.DataFrame, table: pl.DataFrame, rejected: pl.DataFrame) -> Outcome:
    rows = _shown(_rejected_for(rejected, "size_disagrees"))
    scanned = raw.select("sample_id", scanned_height="height", scanned_width="width")
    both = table.select("sample_id", "height", "width").join(scanned, on="sample_id", how="left")
    same = (pl.col("height") == pl.col("scanned_height")) & (pl.col("width") == pl.col("scanned_width"))
    rows += both.filter(~same.fill_null(value=False)).rows(named=True)
    if not rows:
        return Outcome(
            True, f"each of {counted(len(table), 'image')} decodes to the size that the scan recorded"
        )
    summary = counted(len(rows), "image decodes", "images decode")
    summary += f" to another size than recorded, the first is {rows[0]['sample_id']}"
    return Outcome(False, summary, "export these images again, or remove them", rows)


def _file_size_outliers(
    context: CheckContext, raw: pl.DataFrame, table: pl.DataFrame, rejected: pl.DataFrame
) -> Outcome:
    """Whether each kept file still is the file of the scan, now; and how many bytes were rejected."""
    if not context.sources:
        return Outcome(True, "not asked: the datasets are not looked at")
    rows = _shown(_rejected_for(rejected, "changed", "vanished"))
    all_kept = raw["sample_id"].equals(table["sample_id"])
    kept = raw if all_kept else raw.join(table.select("sample_id"), on="sample_id", how="semi")
    for settings in context.recipe.datasets:
        source = source_at(settings.root)
        for part in only(kept, kept["dataset"] == settings.name).iter_slices(_AT_ONCE):
            rows += _changes(source, part)
    for row in kept.filter(~pl.col("dataset").is_in([each.name for each in context.recipe.datasets])).rows():
        rows.append({"sample_id": row[0], "reason": "vanished: its dataset is not in the recipe any more"})
    of_rejected = raw.join(rejected, on="sample_id", how="semi")["file_bytes"].sum()
    numbers = {"kept_bytes": int(kept["file_bytes"].sum()), "rejected_bytes": int(of_rejected)}
    if not rows:
        summary = f"no file of {len(table):,} has changed since the scan"
        summary += f"; {counted(numbers['rejected_bytes'], 'byte')} rejected"
        return Outcome(True, summary, numbers=numbers)
    summary = f"{counted(len(rows), 'file')} changed or vanished since the scan, "
    summary += f"the first is {rows[0]['sample_id']}"
    return Outcome(False, summary, "run the job again once the files no longer change", rows, numbers)


def _changes(source: Source, rows: pl.DataFrame) -> list[dict[str, Any]]:
    """What happened to files of one dataset; a new time or version with the old content is no change."""
    compared_columns = list(source.compared_columns)
    then = rows.select("file_bytes", "mtime_ns", "ctime_ns", "inode").to_numpy()
    now = source.stats(rows["path"].to_list())
    told: list[dict[str, Any]] = []
    for index in np.flatnonzero((then[:, compared_columns] != now[:, compared_columns]).any(axis=1)).tolist():
        row = rows.row(index, named=True)
        problem = _change(source.file(row["path"]), row, int(now[index, 0]))
        if problem:
            told.append({"sample_id": row["sample_id"], "reason": problem})
    return told


def _change(file: File, row: dict[str, Any], num_bytes: int) -> str | None:
    if num_bytes >= 0 and num_bytes != row["file_bytes"]:
        return f"changed: {counted(num_bytes, 'byte')}, the scan saw {row['file_bytes']:,}"
    try:
        same = hash_bytes(read_bytes(file)) == row["content_hash"]
    except ImageError as err:
        return f"vanished: {err}"
    return None if same else "changed: as many bytes, and others"


def _validation_apart(recipe: Recipe, table: pl.DataFrame) -> Outcome:
    """No content and no group of look-alikes lies on both sides of the split (FAILURES I24)."""
    fractions = {each.name: each.validation_fraction for each in recipe.datasets}
    if not any(fractions.values()):
        return Outcome(True, "no image is held out for validation")
    split = table.with_columns(held_out=held_out(table, fractions))
    sides = pl.concat(
        split.group_by(same=name).agg(pl.col("held_out").n_unique(), pl.col("sample_id").sort())
        for name in ("content_hash", "duplicate_group")
    )
    leaks = sides.filter(pl.col("held_out") > 1).unique("sample_id").sort("same")
    num_held_out = int(split["held_out"].sum())
    numbers = {"held_out": num_held_out, "trained": len(table) - num_held_out, "leaks": len(leaks)}
    if leaks.is_empty():
        summary = (
            f"held out: {num_held_out:,} of {counted(len(table), 'image')}; none trained on looks like them"
        )
        return Outcome(True, summary, numbers=numbers)
    rows = [{"images": " | ".join(ids)} for ids in leaks["sample_id"]]
    groups = counted(len(rows), "group is", "groups are")
    summary = f"{groups} both trained on and held out: {rows[0]['images']}"
    return Outcome(False, summary, "materialize validated_dataset again", rows, numbers)


def _look_alikes(recipe: Recipe, table: pl.DataFrame, rejected: pl.DataFrame) -> Outcome:
    copies = _shown(_rejected_for(rejected, DUPLICATE))
    alike = table.select("sample_id", "content_hash", "duplicate_group").filter(
        pl.col("duplicate_group").hash().is_duplicated()
    )
    groups = (
        alike.group_by("duplicate_group")
        .agg(pl.col("sample_id").sort(), same_bytes=pl.col("content_hash").n_unique() == 1)
        .filter(pl.col("sample_id").list.len() > 1)
        .sort(pl.col("sample_id").list.len(), "duplicate_group", descending=[True, False])
    )
    num_alike = int(groups["sample_id"].list.len().sum())
    numbers = {"copies_left_out": len(copies), "groups": len(groups), "images_in_groups": num_alike}
    numbers["near_duplicate_bits"] = recipe.checks.near_duplicate_bits
    if not copies and groups.is_empty():
        return Outcome(True, "no two images look alike", numbers=numbers)
    rows = [
        {"what": "same bytes" if same else "look alike", "images": " | ".join(ids)}
        for _, ids, same in groups.iter_rows()
    ]
    rows += [{"what": "copy, left out", "images": row["sample_id"], "of": row["detail"]} for row in copies]
    summary = (
        f"copies left out: {len(copies):,}; images that look alike: {num_alike:,}, in groups: {len(groups):,}"
    )
    summary += f"; the first: {rows[0]['images']}"
    fix = "keep the best of each group, or let them be: training sees such a picture more often than others"
    return Outcome(False, summary, fix, rows, numbers)


def _one_colour(table: pl.DataFrame) -> Outcome:
    rows = table.filter("one_colour").select("sample_id", "height", "width").rows(named=True)
    if not rows:
        return Outcome(True, "every image has more than one colour", numbers={"one_colour": 0})
    images = counted(len(rows), "image is", "images are")
    summary = f"{images} of a single colour, the first: {rows[0]['sample_id']}"
    fix = "remove them: they are placeholders or failed downloads"
    return Outcome(False, summary, fix, rows, {"one_colour": len(rows)})
