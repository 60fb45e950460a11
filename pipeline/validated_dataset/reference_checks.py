"""Checks of validated_dataset on reference images; they pass if no dataset has references."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from pipeline.checks.findings import CheckContext, Outcome
from pipeline.errors import counted
from pipeline.validated_dataset.pair_checks import matched_outcome, rejected_outcome

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

_PREFIX = "reference_"
_ABSENT = ("reference_missing", "reference_not_found", "reference_ambiguous", "reference_shared")
"""Reasons of samples without exactly one file of a reference; other reasons concern the file's content."""


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
    is_absent = pl.col("reason").is_in(_ABSENT)
    is_reference = pl.col("reason").str.starts_with(_PREFIX)
    outcomes = (
        _present(context.recipe, with_references, numbers, rejected.filter(is_absent)),
        _usable(rejected.filter(is_reference & ~is_absent)),
        matched_outcome(context, "reference"),
    )
    return dict(zip(names, outcomes, strict=True))


def _present(recipe: Recipe, table: pl.DataFrame, numbers: dict[str, int], missing: pl.DataFrame) -> Outcome:
    if not missing.is_empty():
        images = counted(len(missing), "image")
        return rejected_outcome(f"{images} without exactly one file for each reference", missing)

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


def _usable(unusable: pl.DataFrame) -> Outcome:
    if unusable.is_empty():
        return Outcome(True, "all references can be decoded")
    return rejected_outcome(
        f"{counted(len(unusable), 'image has', 'images have')} an unusable reference", unusable
    )
