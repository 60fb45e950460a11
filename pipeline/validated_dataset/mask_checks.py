"""Checks of validated_dataset on masks; they pass if no dataset has masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from pipeline.checks.findings import CheckContext, Outcome
from pipeline.errors import counted
from pipeline.validated_dataset.pair_checks import matched_outcome, rejected_outcome

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

_PREFIX = "mask_"
_ABSENT = ("mask_missing", "mask_ambiguous", "mask_shared", "mask_alpha_missing")
"""Reasons of samples without exactly one mask; other reasons with the prefix concern the mask's content."""


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
    is_absent = pl.col("reason").is_in(_ABSENT)
    is_mask = pl.col("reason").str.starts_with(_PREFIX)
    outcomes = (
        _present(context.recipe, with_masks, rejected.filter(is_absent)),
        _usable(with_masks, rejected.filter(is_mask & ~is_absent)),
        matched_outcome(context, "mask"),
        _white(with_masks),
    )
    return dict(zip(names, outcomes, strict=True))


def _present(recipe: Recipe, table: pl.DataFrame, missing: pl.DataFrame) -> Outcome:
    if not missing.is_empty():
        images = counted(len(missing), "image has", "images have")
        return rejected_outcome(f"{images} no mask, or several", missing)
    if not table.is_empty() and ("mask_mean" not in table.columns or table["mask_mean"].has_nulls()):
        summary = "the table has samples without the mask that their dataset now requires"
        return Outcome(False, summary, f"run the cache job again: latentline run {recipe.name} --cache-only")
    return Outcome(
        True, f"{counted(len(table), 'sample')}, each with one mask", numbers={"masks": len(table)}
    )


def _usable(table: pl.DataFrame, unusable: pl.DataFrame) -> Outcome:
    if unusable.is_empty():
        return Outcome(True, f"{counted(len(table), 'mask')} of the size of the image, none black")
    return rejected_outcome(f"{counted(len(unusable), 'mask')} cannot be used", unusable)


def _white(table: pl.DataFrame) -> Outcome:
    if "mask_mean" not in table.columns:
        return Outcome(True, "no mask is white")
    white = table.filter(pl.col("mask_mean") == 1.0).select("sample_id").rows(named=True)
    if not white:
        return Outcome(True, "no mask is white", numbers={"white": 0})
    masks = counted(len(white), "mask is", "masks are")
    summary = f"{masks} white everywhere, first {white[0]['sample_id']}"
    return Outcome(False, summary, "draw these masks, or ignore the warning", white, {"white": len(white)})
