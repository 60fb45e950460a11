"""Checks of validated_dataset on masks and reference images; they pass if no dataset has such files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from pipeline.errors import counted
from pipeline.reporting.findings import CheckContext, Outcome
from pipeline.reporting.rejections import REJECTED_COLUMNS, most_frequent_first, most_frequent_fixes

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

_STAGE = "validated_dataset"

_MASK_PREFIX = "mask_"
_MASK_ABSENT = ("mask_missing", "mask_ambiguous", "mask_shared", "mask_alpha_missing")
"""Reasons of samples without exactly one mask; other reasons with the prefix concern the mask's content."""

_REFERENCE_PREFIX = "reference_"
_REFERENCE_ABSENT = ("reference_missing", "reference_not_found", "reference_ambiguous", "reference_shared")
"""Reasons of samples without exactly one file of a reference; other reasons concern the file's content."""


def mask_outcomes(context: CheckContext, table: pl.DataFrame, rejected: pl.DataFrame) -> dict[str, Outcome]:
    """Return the outcomes of the checks on masks by name.

    Args:
        context: The checked recipe and its reports.
        table: Table validated_dataset with `mask_mean`, if it has that column.
        rejected: Samples that the stage rejected.
    """
    names = ("masks_present", "masks_usable", "masks_matched", "masks_white")
    masked = [dataset.name for dataset in context.recipe.datasets if dataset.mask is not None]
    if not masked:
        return dict.fromkeys(names, Outcome(True, "no dataset has masks"))

    with_masks = table.filter(pl.col("dataset").is_in(masked))
    is_absent = pl.col("reason").is_in(_MASK_ABSENT)
    is_mask = pl.col("reason").str.starts_with(_MASK_PREFIX)
    outcomes = (
        _masks_present(context.recipe, with_masks, rejected.filter(is_absent)),
        _masks_usable(with_masks, rejected.filter(is_mask & ~is_absent)),
        _matched_outcome(context, "mask"),
        _masks_white(with_masks),
    )
    return dict(zip(names, outcomes, strict=True))


def _masks_present(recipe: Recipe, table: pl.DataFrame, missing: pl.DataFrame) -> Outcome:
    if not missing.is_empty():
        images = counted(len(missing), "image has", "images have")
        return _rejected_outcome(f"{images} no mask, or several", missing)
    if not table.is_empty() and ("mask_mean" not in table.columns or table["mask_mean"].has_nulls()):
        summary = "the table has samples without the mask that their dataset now requires"
        return Outcome(False, summary, f"run the cache job again: latentline run {recipe.name} --cache-only")
    return Outcome(
        True, f"{counted(len(table), 'sample')}, each with one mask", numbers={"masks": len(table)}
    )


def _masks_usable(table: pl.DataFrame, unusable: pl.DataFrame) -> Outcome:
    if unusable.is_empty():
        return Outcome(True, f"{counted(len(table), 'mask')} of the size of the image, none black")
    return _rejected_outcome(f"{counted(len(unusable), 'mask')} cannot be used", unusable)


def _masks_white(table: pl.DataFrame) -> Outcome:
    if "mask_mean" not in table.columns:
        return Outcome(True, "no mask is white")
    white = table.filter(pl.col("mask_mean") == 1.0).select("sample_id").rows(named=True)
    if not white:
        return Outcome(True, "no mask is white", numbers={"white": 0})
    masks = counted(len(white), "mask is", "masks are")
    summary = f"{masks} white everywhere, first {white[0]['sample_id']}"
    return Outcome(False, summary, "draw these masks, or ignore the warning", white, {"white": len(white)})


def reference_outcomes(
    context: CheckContext, table: pl.DataFrame, rejected: pl.DataFrame
) -> dict[str, Outcome]:
    """Return the outcomes of the checks on references by name.

    Args:
        context: The checked recipe and its reports.
        table: Table validated_dataset with `reference_images`, if it has that column.
        rejected: Samples that the stage rejected.
    """
    names = ("references_present", "references_usable", "references_matched")
    numbers = {each.name: len(each.references) for each in context.recipe.datasets if each.references}
    if not numbers:
        return dict.fromkeys(names, Outcome(True, "no dataset has references"))

    with_references = table.filter(pl.col("dataset").is_in(list(numbers)))
    is_absent = pl.col("reason").is_in(_REFERENCE_ABSENT)
    is_reference = pl.col("reason").str.starts_with(_REFERENCE_PREFIX)
    outcomes = (
        _references_present(context.recipe, with_references, numbers, rejected.filter(is_absent)),
        _references_usable(rejected.filter(is_reference & ~is_absent)),
        _matched_outcome(context, "reference"),
    )
    return dict(zip(names, outcomes, strict=True))


def _references_present(
    recipe: Recipe, table: pl.DataFrame, numbers: dict[str, int], missing: pl.DataFrame
) -> Outcome:
    if not missing.is_empty():
        images = counted(len(missing), "image")
        return _rejected_outcome(f"{images} without exactly one file for each reference", missing)

    recorded = pl.lit(None, pl.String)
    if "reference_images" in table.columns:
        recorded = pl.col("reference_images")
    number = recorded.str.json_decode(pl.List(pl.Struct({"hash": pl.String}))).list.len()
    expected = pl.col("dataset").replace_strict(numbers, return_dtype=pl.UInt32)
    if not table.is_empty() and not table.select(number.eq_missing(expected).all()).item():
        summary = "the table has samples with fewer or more references than the recipe now names"
        return Outcome(False, summary, f"run the cache job again: latentline run {recipe.name} --cache-only")
    total = table.select(expected.sum()).item() if len(table) else 0
    return Outcome(
        True,
        f"{counted(len(table), 'sample')}, each with all of its references",
        numbers={"references": int(total)},
    )


def _references_usable(unusable: pl.DataFrame) -> Outcome:
    if unusable.is_empty():
        return Outcome(True, "all references can be decoded")
    return _rejected_outcome(
        f"{counted(len(unusable), 'image has', 'images have')} an unusable reference", unusable
    )


def _rejected_outcome(summary: str, rejected: pl.DataFrame) -> Outcome:
    """Return the failure of a check that rejected these samples; its summary ends with the first of them."""
    rows = most_frequent_first(rejected).select(REJECTED_COLUMNS).rows(named=True)
    summary += f"; {rows[0]['sample_id']}: {rows[0]['detail']}"
    return Outcome(False, summary, most_frequent_fixes(rejected), rows)


def _matched_outcome(context: CheckContext, noun: str) -> Outcome:
    """Return whether every file belongs to an image.

    Args:
        context: The checked recipe and its reports.
        noun: Name of one such file; the key of the report has its plural with "s".
    """
    report, key = context.report(_STAGE) or {}, f"unmatched_{noun}s"
    number, paths = report.get(key, 0), report.get("named", {}).get(key, [])
    if not number:
        return Outcome(True, f"each {noun} belongs to an image")
    files = counted(number, f"{noun} belongs", f"{noun}s belong")
    fix = f"rename the {noun}s like their images, or remove them"
    rows = [{noun: path} for path in paths]
    return Outcome(False, f"{files} to no image, first {paths[0]}", fix, rows, {key: number})
