"""The captions that the diagnosis before the next training would measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from pipeline.cache.recipe_entries import SEEN, STAT_COLUMNS
from pipeline.diagnosis.caption_swap import ROUNDS, num_passes
from pipeline.diagnosis.entries import loss_requests, loss_spec, num_others, swapped_inputs
from pipeline.maintenance.expected import Expected, estimate_seconds, unusable_entries

if TYPE_CHECKING:
    from pipeline.cache.recipe_entries import RecipeEntries
    from pipeline.storage.tables import Tables


@dataclass(frozen=True)
class DiagnosisForecast:
    """Captions to measure. The attributes are keys of `latentline plan --json`.

    Attributes:
        there: Number of captions that are measured already.
        to_measure: Number of captions to measure.
        least_passes: Number of forward passes of the base model if the first round decides all of them.
        most_passes: Number of forward passes if none of them is decided.
        seconds: Time to measure them, without process start and model loading. None if no speed was measured
            on this machine yet.
    """

    there: int
    to_measure: int
    least_passes: int
    most_passes: int
    seconds: float | None


def forecast_diagnosis(
    entries: RecipeEntries, tables: Tables, latents: pl.DataFrame, captions: pl.DataFrame
) -> DiagnosisForecast | None:
    """Return the captions that the recipe's diagnosis would measure; None for a recipe without one.

    `latents` are the requests of vae_latents, and `captions` the rows of `text_rows`.
    """
    if "diagnosis" not in entries.recipe.optional_assets:
        return None
    # Neither the losses nor their keys depend on the length in tokens.
    text = captions.with_columns(
        entries.text_keys(captions["caption"], captions.get_column(SEEN, default=None)).alias("key"),
        text_length=pl.lit(1, pl.Int32),
    )
    known = tables.read_previous("diagnosis")
    known = None if known is None else known.drop_nulls("key")
    requests = loss_requests(entries, swapped_inputs(entries, latents, text), known).rows

    expected, passes, cost = Expected("diagnoses"), [0, 0], 0
    for row, spec, _ in unusable_entries(
        entries, expected, requests.drop(STAT_COLUMNS), known, spec_of=loss_spec
    ):
        expected.add("caption to measure", row["name"], spec.file_bytes)
        for index, draws in enumerate((ROUNDS[0], ROUNDS[-1])):
            passes[index] += num_passes(len(row["captions"]), draws, num_others(entries.recipe))
        cost += row["cost"]
    estimate_seconds(entries, expected, cost=cost)
    return DiagnosisForecast(expected.there, expected.to_make, *passes, seconds=expected.seconds)
