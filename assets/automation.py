"""Automatic cache updates: a schedule, a sensor that watches datasets, and one that ends dead runs."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from dagster import (
    DagsterInstance,
    DagsterRunStatus,
    DefaultScheduleStatus,
    DefaultSensorStatus,
    RunRequest,
    RunsFilter,
    ScheduleDefinition,
    ScheduleEvaluationContext,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    schedule,
    sensor,
)

from assets.names import RECIPE_TAG
from pipeline.errors import DatasetError
from pipeline.recipe import RecacheSettings, Recipe
from pipeline.storage.addresses import Address
from resources.dead_runs import end_dead_runs

_ENDED = {
    DagsterRunStatus.SUCCESS,
    DagsterRunStatus.FAILURE,
    DagsterRunStatus.CANCELED,
    DagsterRunStatus.MANAGED,  # executed outside of Dagster, which never records an end
}

# All but the known ends, because a later Dagster may add statuses, such as SUSPENDED.
IN_PROGRESS = [status for status in DagsterRunStatus if status not in _ENDED]
"""Statuses of runs that have not ended."""

DEAD_RUNS_S = 30
"""Seconds between two searches for dead runs."""

# Dagster ends a tick after 60 s by default.
SLICE_S = 20.0
"""Seconds for which one tick lists files."""


@dataclass(frozen=True)
class SensorState:
    """State of the sensor between two ticks, stored as JSON in its cursor.

    Attributes:
        seen: Fingerprint of the files after the last complete listing.
        handled: Fingerprint of the files for which a run was last requested. Files that return to an older
            state are a change again.
        position: Fields of the `ScanPosition` at which the listing of a large dataset stopped; None between
            two listings.
    """

    seen: str | None = None
    handled: str | None = None
    position: dict[str, Any] | None = None

    def advance(self, fingerprint: str, *, active_run: str | None) -> tuple["SensorState", str | None]:
        """Return the next state, and the reason to skip this tick or None to request a run."""
        if fingerprint == self.handled:
            return SensorState(fingerprint, self.handled), "nothing has changed since the last requested run"

        # Somebody may still be copying files (FAILURES O05): two listings, `settle_s` apart, must be equal.
        if fingerprint != self.seen:
            return (
                SensorState(fingerprint, self.handled),
                f"files are changing (state {fingerprint}): waiting until they settle",
            )
        if active_run is not None:
            return self, f"run {active_run} of this recipe is in progress: waiting for its end"
        return SensorState(fingerprint, fingerprint), None


def recache_schedule(recipe: Recipe, job_name: str) -> ScheduleDefinition | None:
    """Return the schedule `<recipe>_recache` of a job, or None without a cron expression."""
    if recipe.recache.cron is None:
        return None

    @schedule(
        cron_schedule=recipe.recache.cron,
        job_name=job_name,
        name=f"{recipe.name}_recache",
        default_status=_schedule_status(recipe.recache),
        description=f"Brings the cache of {recipe.name} up to date, unless one of its runs is in progress.",
    )
    def recache(context: ScheduleEvaluationContext) -> RunRequest | SkipReason:
        active_run = find_active_run(context.instance, recipe)
        if active_run is not None:
            return SkipReason(f"run {active_run} of this recipe is in progress")
        return RunRequest(tags={RECIPE_TAG: recipe.name})

    return recache


def dataset_sensor(recipe: Recipe, job_name: str) -> SensorDefinition:
    """Return the sensor `<recipe>_dataset_changed` of a job."""

    @sensor(
        job_name=job_name,
        name=f"{recipe.name}_dataset_changed",
        minimum_interval_seconds=recipe.recache.settle_s,
        default_status=_sensor_status(recipe.recache),
        description=f"Starts {recipe.name}_cache when its images or captions have changed and settled.",
    )
    def dataset_changed(context: SensorEvaluationContext) -> SensorResult:
        from pipeline.raw_images.scan_fingerprint import ScanPosition, scan_slice

        state = SensorState(**json.loads(context.cursor)) if context.cursor else SensorState()
        position = None
        if state.position is not None:
            fields: Any = {**state.position, "after": tuple(state.position["after"])}  # JSON has no tuples
            position = ScanPosition(**fields)
        try:
            listed = scan_slice(watched_addresses(recipe), position, seconds=SLICE_S)
        except (OSError, DatasetError) as err:
            # With the same cursor, the next tick continues where this one began.
            return SensorResult(skip_reason=f"a dataset cannot be listed: {err}", cursor=context.cursor)

        if isinstance(listed, ScanPosition):
            cursor = json.dumps(asdict(replace(state, position=asdict(listed))))
            reason = f"listed {listed.num_files:,} files so far: the next tick continues"
            return SensorResult(skip_reason=reason, cursor=cursor)

        state = replace(state, position=None)
        state, skip_reason = state.advance(listed, active_run=find_active_run(context.instance, recipe))
        cursor = json.dumps(asdict(state))
        if skip_reason is not None:
            return SensorResult(skip_reason=skip_reason, cursor=cursor)
        # No run_key: Dagster would never run the same key twice, and files may return to an older state.
        return SensorResult(run_requests=[RunRequest(tags={RECIPE_TAG: recipe.name})], cursor=cursor)

    return dataset_changed


def skipping_schedule(
    recipe: str, recache: RecacheSettings, job_name: str, reason: str
) -> ScheduleDefinition | None:
    """Return the schedule of a broken recipe, which starts nothing, or None without a cron expression."""
    if recache.cron is None:
        return None

    @schedule(
        cron_schedule=recache.cron,
        job_name=job_name,
        name=f"{recipe}_recache",
        default_status=_schedule_status(recache),
        description="Starts nothing until the recipe is repaired.",
    )
    def skip(context: ScheduleEvaluationContext) -> SkipReason:
        del context
        return SkipReason(reason)

    return skip


def skipping_sensor(recipe: str, recache: RecacheSettings, job_name: str, reason: str) -> SensorDefinition:
    """Return the sensor of a broken recipe, which starts nothing and leaves its cursor unchanged."""

    @sensor(
        job_name=job_name,
        name=f"{recipe}_dataset_changed",
        minimum_interval_seconds=recache.settle_s,
        default_status=_sensor_status(recache),
        description="Starts nothing until the recipe is repaired.",
    )
    def skip(context: SensorEvaluationContext) -> SensorResult:
        return SensorResult(skip_reason=reason, cursor=context.cursor)

    return skip


def _schedule_status(recache: RecacheSettings) -> DefaultScheduleStatus:
    return DefaultScheduleStatus.RUNNING if recache.enabled else DefaultScheduleStatus.STOPPED


def _sensor_status(recache: RecacheSettings) -> DefaultSensorStatus:
    running = recache.enabled and recache.on_change
    return DefaultSensorStatus.RUNNING if running else DefaultSensorStatus.STOPPED


@sensor(
    name="dead_runs",
    minimum_interval_seconds=DEAD_RUNS_S,
    default_status=DefaultSensorStatus.RUNNING,
    description="Marks runs as failed if their process died without reporting it: they would block others.",
)
def dead_runs_sensor(context: SensorEvaluationContext) -> SkipReason:
    """End the dead runs of the code server's machine."""
    ended = end_dead_runs(context.instance)
    return SkipReason(f"ended {', '.join(ended)}" if ended else "no dead runs")


def watched_addresses(recipe: Recipe) -> list[Address]:
    """Return every folder and manifest that shows changes of the datasets and their side inputs."""
    addresses = [path for dataset in recipe.datasets for path in (dataset.root, dataset.path)]
    side_inputs = [each.settings.path for dataset in recipe.datasets for each in dataset.side_inputs]
    return list(dict.fromkeys([*addresses, *(path for path in side_inputs if path is not None)]))


def find_active_run(instance: DagsterInstance, recipe: Recipe) -> str | None:
    """Return the id of a run of `recipe` that is queued or in progress, or None."""
    for record in instance.get_run_records(RunsFilter(statuses=IN_PROGRESS)):
        run = record.dagster_run

        # Runs of assets that were selected by hand in the UI lack the tag of the recipe's jobs.
        selected = run.asset_selection or ()
        if run.tags.get(RECIPE_TAG) == recipe.name or any(key.path[0] == recipe.name for key in selected):
            return run.run_id
    return None
