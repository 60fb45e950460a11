"""Forecast of the training in a recipe's next job: what it would do and why, and how long it would take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from pipeline.cache.recipe_entries import SEEN
from pipeline.outputs.folder import outputs_of
from pipeline.trained_lora.duration import Duration, expected_duration
from pipeline.trained_lora.next_action import NextAction, next_action
from pipeline.trained_lora.stage import plan_run, share_warnings
from pipeline.trained_lora.supported_settings import training_warnings

if TYPE_CHECKING:
    from pipeline.cache.recipe_entries import RecipeEntries


@dataclass(frozen=True)
class TrainingForecast:
    """Forecast of the next training. The attributes are keys of `latentline plan --json`.

    Attributes:
        num_inputs: Number of samples and buckets that are trained on.
        duration: None if no training of the base model was measured on this machine.
        warnings: Warnings that the training would log at its start.
    """

    action: NextAction
    num_inputs: int
    duration: Duration | None
    warnings: tuple[str, ...]


def forecast_training(
    entries: RecipeEntries,
    latents: pl.DataFrame,
    captions: pl.DataFrame,
    *,
    continue_run: str | None = None,
) -> TrainingForecast:
    """Return what the next training would do.

    `latents` are the requests of vae_latents, and `captions` the rows of `text_rows`. None of their entries
    needs to exist, because a run's identity depends on keys. `continue_run` is a run that it would continue,
    or "latest".

    Raises:
        TrainingError: As `plan_run`.
        ModelError: As `plan_run`.
        StoreError: The service of the output folder does not answer.
    """
    # The length in tokens decides the size of an entry, but neither the run nor its plan.
    text = captions.with_columns(
        entries.text_keys(captions["caption"], captions.get_column(SEEN, default=None)).alias("key"),
        text_length=pl.lit(1, pl.Int32),
    )
    job, facts, samples = plan_run(entries, latents, text, continue_run=continue_run, log=entries.log)
    outputs = outputs_of(entries.recipe, entries.log)
    uploaded = outputs.names(f"runs/{job.run}") if outputs.is_remote else None
    action = next_action(job, facts, samples, uploaded=uploaded)
    return TrainingForecast(
        action=action,
        num_inputs=len(job.inputs.trained),
        duration=expected_duration(entries, job, action),
        warnings=(*share_warnings(job, samples), *training_warnings(job.recipe, entries.family)),
    )
