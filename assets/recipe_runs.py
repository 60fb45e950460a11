"""Runs of recipes in Dagster's instance: which are in progress, and how the last ones have ended."""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dagster import (
    AssetKey,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    RepositoryDefinition,
    RunRecord,
    RunsFilter,
)

from assets.names import AFTER_CACHE, asset_key
from assets.sources import DATA_VERSION_TAG
from pipeline.recipe import Recipe
from pipeline.storage.needed_columns import ALL_INPUTS, STAGE_INPUTS
from resources.failures import has_closed_gate
from resources.run_events import run_entries
from resources.run_names import IMPLICIT_JOB, RECIPE_TAG
from resources.run_worker import has_machine
from resources.step_names import step_name
from resources.tables import RECIPE

_ENDED = {
    DagsterRunStatus.SUCCESS,
    DagsterRunStatus.FAILURE,
    DagsterRunStatus.CANCELED,
    DagsterRunStatus.MANAGED,  # executed outside of Dagster, which never records an end
}

# All but the known ends, because a later Dagster may add statuses, such as SUSPENDED.
IN_PROGRESS = [status for status in DagsterRunStatus if status not in _ENDED]
"""Statuses of runs that have not ended."""

# Undocumented: no public names. Dagster sets the first for re-executions "from failure", by hand or by
# `run_retries`, and the second for "from asset failure".
_FROM_FAILURE_TAG, _FROM_ASSET_FAILURE_TAG = "dagster/is_resume_retry", "dagster/is_asset_resume_retry"

# Undocumented, for steps of a run that somebody selects and executes again. The UI copies the tags of that
# run, except `_FROM_FAILURE_TAG`.
_SELECTED_STEPS_TAG = "dagster/step_selection"

LONGEST_START_S = 600.0
"""Seconds after which a run that was created and has neither begun nor been queued counts as lost."""

_COUNTS = ("in", "rejected")
"""Metadata entries with the numbers of images that a stage has received, and that its table lacks."""

_MAX_RUNS = 100
"""Number of a recipe's newest runs among which a tick looks for the ones since a change."""


@dataclass(frozen=True)
class UnsuccessfulRun:
    """A run of a recipe's cache job that ended without success.

    Attributes:
        run_id: Its id.
        end_s: When it ended, in seconds since the epoch.
        is_cancelled: Whether somebody stopped it.
        has_closed_gate: Whether a gate stopped it: the next run would end in the same way.
    """

    run_id: str
    end_s: float
    is_cancelled: bool = False
    has_closed_gate: bool = False


def runs_since(
    instance: DagsterInstance, recipe: Recipe, cache_job: str, since: float
) -> tuple[str | None, list[UnsuccessfulRun]]:
    """Return a successful run of the recipe that began after `since`, and failed runs of its cache job.

    The failed run that ended last is the first one. A run of only some assets up to the cache is neither.
    """
    filters = RunsFilter(tags={RECIPE_TAG: recipe.name})
    failed: dict[str, UnsuccessfulRun] = {}
    # Dagster sorts by creation, but a run may have waited in the queue until a newer one had ended.
    records = sorted(instance.get_run_records(filters, limit=_MAX_RUNS), key=_ended_s, reverse=True)
    for record in records:
        # No other run of the recipe is in progress: these are lost, and none of their times is certain.
        if record.dagster_run.status in IN_PROGRESS or _began_s(record) < since:
            continue

        # The run that a retry continues may have scanned the files before they changed.
        run, first = record.dagster_run, continued_runs(instance, record)[0]
        # After a failure too: the checks of some steps may have judged tables of files before the change.
        if _began_s(first) < since or not _caches_all(first.dagster_run, recipe):
            continue
        if run.status == DagsterRunStatus.SUCCESS:
            return run.run_id, list(failed.values())
        # `run_retries` has its own number of attempts, so all of them are one here.
        attempt = first.dagster_run.run_id
        if run.job_name == cache_job and attempt not in failed:
            failed[attempt] = UnsuccessfulRun(
                run.run_id,
                _ended_s(record),
                is_cancelled=run.status == DagsterRunStatus.CANCELED,
                has_closed_gate=not failed and has_closed_gate(instance, run.run_id),
            )
    return None, list(failed.values())


def _began_s(record: RunRecord) -> float:
    # The creation is the last resort: PostgreSQL stores it in its own time zone.
    return record.start_time or record.end_time or record.create_timestamp.timestamp()


def _ended_s(record: RunRecord) -> float:
    return record.end_time or record.update_timestamp.timestamp()


def continued_runs(instance: DagsterInstance, record: RunRecord) -> list[RunRecord]:
    """Return a run, and before it the runs that it continues from their failed steps, the first one first."""
    runs = [record]
    while _is_from_failure(runs[0].dagster_run):
        parent = runs[0].dagster_run.parent_run_id
        parent_record = None if parent is None else instance.get_run_record_by_id(parent)
        if parent_record is None:
            break
        runs.insert(0, parent_record)
    return runs


def _is_from_failure(run: DagsterRun) -> bool:
    is_copied = _SELECTED_STEPS_TAG in run.tags
    return _FROM_FAILURE_TAG in run.tags or (_FROM_ASSET_FAILURE_TAG in run.tags and not is_copied)


def cached_versions(instance: DagsterInstance, recipe: Recipe) -> str:
    """Return 16 hex digits over the latest tables and cache entries of the recipe, and what they left out."""
    # Also the assets that only some recipes have: the recipe in its file may be another one than in its run.
    keys = [asset_key(recipe, name) for name in ALL_INPUTS if name not in AFTER_CACHE]
    entries = [record.asset_entry.last_materialization for record in instance.get_asset_records(keys)]
    tables = [entry.asset_materialization for entry in entries if entry is not None]
    versions = {
        table.asset_key.to_user_string(): [
            (table.tags or {}).get(DATA_VERSION_TAG),
            # An image that a gate rejects may change no table, but its gate stays closed.
            *(str(table.metadata[name].value) for name in _COUNTS if name in table.metadata),
        ]
        for table in tables
        if table is not None
    }
    return hashlib.sha256(json.dumps(versions, sort_keys=True).encode("utf-8")).hexdigest()[:16]


def _caches_all(run: DagsterRun, recipe: Recipe) -> bool:
    """Return whether a run executes all assets up to the cache: somebody may select some, steps or checks."""
    names = [name for name in (*STAGE_INPUTS, *recipe.optional_assets) if name not in AFTER_CACHE]
    if run.asset_selection or run.asset_check_selection is not None:
        keys = {asset_key(recipe, name) for name in names}
        if not keys <= (run.asset_selection or set[AssetKey]()):
            return False
    steps = {step_name(recipe.name, name) for name in names}
    return run.step_keys_to_execute is None or steps <= set(run.step_keys_to_execute)


def find_active_run(
    instance: DagsterInstance, recipe: Recipe, repository: RepositoryDefinition | None
) -> str | None:
    """Return the id of a run of `recipe` that is queued or in progress, or None.

    `repository` has the assets of the recipe.
    """
    for run in _runs_in_progress(instance, tags={RECIPE_TAG: recipe.name}):
        return run.run_id

    # Runs of assets that were selected by hand lack the tag of the recipe's jobs.
    for run in _runs_in_progress(instance, job_name=IMPLICIT_JOB):
        if recipe.name in _selected_recipes(run, repository):
            return run.run_id
    return None


def _runs_in_progress(instance: DagsterInstance, **filters: Any) -> Iterator[DagsterRun]:
    for record in instance.get_run_records(RunsFilter(statuses=IN_PROGRESS, **filters)):
        if not _is_lost(instance, record.dagster_run):
            yield record.dagster_run


def _is_lost(instance: DagsterInstance, run: DagsterRun) -> bool:
    # Nothing ends a run whose process was killed after it had created the run, and before it began it.
    if run.status != DagsterRunStatus.NOT_STARTED:
        return False

    # Dagster stores the plan of assets and checks with a run. The time of the creation is not used, because
    # PostgreSQL stores it in its own time zone.
    times = [entry.timestamp for entry in run_entries(instance, run.run_id)]
    return bool(times) and max(times) < time.time() - LONGEST_START_S


def is_recipe_run(run: DagsterRun, repository: RepositoryDefinition | None) -> bool:
    """Return whether a run is of a recipe, and not of another job in the same project."""
    # A job of the project itself may contain assets of recipes; each of their steps records its machine.
    return RECIPE_TAG in run.tags or has_machine(run) or bool(_selected_recipes(run, repository))


def selected_assets(run: DagsterRun) -> set[AssetKey]:
    """Return the assets that somebody selected for a run, and the assets of selected checks."""
    # Checks may be executed without their assets.
    checked = [check.asset_key for check in run.asset_check_selection or ()]
    return {*(run.asset_selection or ()), *checked}


def _selected_recipes(run: DagsterRun, repository: RepositoryDefinition | None) -> set[str]:
    """Return the recipes whose assets the run selects."""
    assets = {} if repository is None else repository.assets_defs_by_key
    metadata = [assets[key].get_asset_spec(key).metadata for key in selected_assets(run) if key in assets]
    return {str(each[RECIPE]) for each in metadata if RECIPE in each}
