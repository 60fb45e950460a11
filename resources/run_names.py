"""Tags and job names by which runs of recipes are found in Dagster's instance."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster import DagsterRun

RECIPE_TAG = "latentline/recipe"
"""Tag on each run of a recipe's jobs, by which the schedule and the sensor find runs in progress."""

ATTEMPT_TAG = "latentline/attempt"
"""Tag on each run that the sensor starts, such as "2 of 4"."""

# Undocumented: a run of selected assets has no other mark.
IMPLICIT_JOB = "__ASSET_JOB"
"""Dagster's job of assets that somebody selected, in the UI or with `dg launch --assets`."""

# Undocumented: `IMPLICIT_JOB`, the jobs of schedules and sensors with a `target`, and the one of
# `dagster.materialize` begin with it.
_HIDDEN_JOB = "__"


def named_job(run: DagsterRun) -> str | None:
    """Return the job of a run; None if Dagster itself has made the job for a selection of assets."""
    return None if run.job_name.startswith(_HIDDEN_JOB) else run.job_name
