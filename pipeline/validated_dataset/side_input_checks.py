"""Checks of validated_dataset on side inputs; they pass if no dataset has such files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from pipeline.errors import counted
from pipeline.reporting.findings import CheckContext, Outcome
from pipeline.reporting.rejections import REJECTED_COLUMNS, most_frequent_first, most_frequent_fixes
from pipeline.side_inputs import SIDE_INPUTS

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.side_inputs import SideInput

_STAGE = "validated_dataset"


def side_input_outcomes(
    context: CheckContext, table: pl.DataFrame, rejected: pl.DataFrame
) -> dict[str, Outcome]:
    """Return the outcomes of the checks on side inputs by name.

    Args:
        context: The checked recipe and its reports.
        table: Table validated_dataset with its columns of side inputs.
        rejected: Samples that the stage rejected.
    """
    outcomes: dict[str, Outcome] = {}
    for side_input in SIDE_INPUTS:
        names = [f"{side_input.plural}_{check}" for check in ("present", "usable", "matched")]
        numbers = side_input.numbers(context.recipe)
        if not numbers:
            outcomes |= dict.fromkeys(names, Outcome(True, f"no dataset has {side_input.plural}"))
            continue

        # Reasons of both checks have the same prefix: a sample has no file, or the file cannot be used.
        reasons = pl.col("reason")
        is_absent = reasons.is_in([f"{side_input.name}_{reason}" for reason in side_input.absent])
        is_unusable = reasons.str.starts_with(f"{side_input.name}_") & ~is_absent
        in_datasets = table.filter(pl.col("dataset").is_in(list(numbers)))
        results = (
            _present(context.recipe, side_input, in_datasets, rejected.filter(is_absent)),
            _usable(side_input, rejected.filter(is_unusable)),
            _matched(context, side_input),
        )
        outcomes |= dict(zip(names, results, strict=True))
    return outcomes


def white_masks(recipe: Recipe, table: pl.DataFrame) -> Outcome:
    """Return the masks that are white everywhere, and so have no effect."""
    masked = [dataset.name for dataset in recipe.datasets if dataset.mask is not None]
    if not masked:
        return Outcome(True, "no dataset has masks")
    if "mask_mean" not in table.columns:
        return Outcome(True, "no mask is white")
    white = table.filter(pl.col("dataset").is_in(masked) & (pl.col("mask_mean") == 1.0))
    rows = white.select("sample_id").rows(named=True)
    if not rows:
        return Outcome(True, "no mask is white", numbers={"white": 0})
    masks = counted(len(rows), "mask is", "masks are")
    summary = f"{masks} white everywhere, first {rows[0]['sample_id']}"
    return Outcome(False, summary, "draw these masks, or ignore the warning", rows, {"white": len(rows)})


def _present(recipe: Recipe, side_input: SideInput, table: pl.DataFrame, missing: pl.DataFrame) -> Outcome:
    """Check that each sample has as many files as its dataset has sections."""
    name, plural = side_input.name, side_input.plural
    if not missing.is_empty():
        images = counted(len(missing), "image")
        wanted = f"file for each {name}" if side_input.several else name
        return _rejected(f"{images} without exactly one {wanted}", missing)

    hashes = pl.lit(None, pl.String)
    if side_input.hash_column in table.columns:
        hashes = side_input.hashes()
    expected = pl.col("dataset").replace_strict(side_input.numbers(recipe), return_dtype=pl.UInt32)
    recorded = hashes.str.split(" ").list.len()
    if not table.is_empty() and not table.select(recorded.eq_missing(expected).all()).item():
        summary = f"the table has samples without the {plural} that their dataset now requires"
        return Outcome(False, summary, f"run the cache job again: latentline run {recipe.name} --cache-only")

    total = table.select(expected.sum()).item() if len(table) else 0
    wanted = f"all of its {plural}" if side_input.several else f"one {name}"
    return Outcome(True, f"{counted(len(table), 'sample')}, each with {wanted}", numbers={plural: int(total)})


def _usable(side_input: SideInput, unusable: pl.DataFrame) -> Outcome:
    if unusable.is_empty():
        return Outcome(True, f"all {side_input.plural} can be used")
    images = counted(len(unusable), "image has", "images have")
    return _rejected(f"{images} an unusable {side_input.name}", unusable)


def _rejected(summary: str, rejected: pl.DataFrame) -> Outcome:
    """Return the failure of a check that rejected these samples; its summary ends with the first of them."""
    rows = most_frequent_first(rejected).select(REJECTED_COLUMNS).rows(named=True)
    summary += f"; {rows[0]['sample_id']}: {rows[0]['detail']}"
    return Outcome(False, summary, most_frequent_fixes(rejected), rows)


def _matched(context: CheckContext, side_input: SideInput) -> Outcome:
    """Check that every file belongs to an image."""
    name, plural = side_input.name, side_input.plural
    report, key = context.report(_STAGE) or {}, f"unmatched_{plural}"
    number, paths = report.get(key, 0), report.get("named", {}).get(key, [])
    if not number:
        return Outcome(True, f"each {name} belongs to an image")
    files = counted(number, f"{name} belongs", f"{plural} belong")
    fix = f"rename the {plural} like their images, or remove them"
    rows = [{name: path} for path in paths]
    return Outcome(False, f"{files} to no image, first {paths[0]}", fix, rows, {key: number})
