"""When the cache is brought up to date unasked: a schedule, and a sensor that watches the files."""

import json
from dataclasses import asdict, dataclass

from dagster import (
    DagsterInstance,
    DagsterRunStatus,
    DefaultScheduleStatus,
    DefaultSensorStatus,
    JobDefinition,
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
from dagster._core.definitions.assets.job.asset_job import IMPLICIT_ASSET_JOB_NAME

from assets.naming import RECIPE_TAG
from pipeline.errors import DatasetError
from pipeline.recipe import Recipe
from pipeline.storage.addresses import Address

_UNDER_WAY = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]


@dataclass(frozen=True)
class Watch:
    """What the sensor remembers between two looks.

    Attributes:
        seen: Fingerprint of the listing at the last look.
        handled: Fingerprint for which the last run was asked; going back to an older one is a new state.
    """

    seen: str | None = None
    handled: str | None = None

    def look(self, now: str, *, busy: str | None) -> tuple["Watch", str | None]:
        """What to remember after seeing `now`, and why no run is asked for; None asks for one.

        Args:
            now: The listing's fingerprint.
            busy: Id of a run of the recipe that is under way.
        """
        if now == self.handled:
            return Watch(now, self.handled), "nothing has changed since the last run was asked for"
        if now != self.seen:
            return Watch(now, self.handled), f"files are changing (state {now}): waiting until they settle"
        if busy is not None:
            return self, f"run {busy} of this recipe is under way: the new state {now} waits for its end"
        return Watch(now, now), None


def recache_schedule(recipe: Recipe, job: JobDefinition) -> ScheduleDefinition | None:
    """`<recipe>_recache`, running by itself when `recache.enabled`; None without a cron expression."""
    if recipe.recache.cron is None:
        return None
    status = DefaultScheduleStatus.RUNNING if recipe.recache.enabled else DefaultScheduleStatus.STOPPED

    @schedule(
        cron_schedule=recipe.recache.cron,
        job=job,
        name=f"{recipe.name}_recache",
        default_status=status,
        description=f"Brings the cache of {recipe.name} up to date; skipped while a run of it is under way.",
    )
    def recache(context: ScheduleEvaluationContext) -> RunRequest | SkipReason:
        busy = run_under_way(context.instance, recipe)
        if busy is not None:
            return SkipReason(f"run {busy} of this recipe is under way")
        return RunRequest(tags={RECIPE_TAG: recipe.name})

    return recache


def dataset_sensor(recipe: Recipe, job: JobDefinition) -> SensorDefinition:
    """`<recipe>_dataset_changed`, running by itself when `recache.enabled` and `recache.on_change`."""
    running = recipe.recache.enabled and recipe.recache.on_change

    @sensor(
        job=job,
        name=f"{recipe.name}_dataset_changed",
        minimum_interval_seconds=recipe.recache.settle_s,
        default_status=DefaultSensorStatus.RUNNING if running else DefaultSensorStatus.STOPPED,
        description=f"Starts {recipe.name}_cache when its images or captions have changed and settled.",
    )
    def dataset_changed(context: SensorEvaluationContext) -> SensorResult:
        from pipeline.raw_images.scan_fingerprint import listing_fingerprint

        try:
            now = listing_fingerprint(watched(recipe))
        except (OSError, DatasetError) as err:
            return SensorResult(skip_reason=f"a dataset cannot be listed: {err}", cursor=context.cursor)
        watch = Watch(**json.loads(context.cursor)) if context.cursor else Watch()
        watch, reason = watch.look(now, busy=run_under_way(context.instance, recipe))
        cursor = json.dumps(asdict(watch))
        if reason is not None:
            return SensorResult(skip_reason=reason, cursor=cursor)
        return SensorResult(run_requests=[RunRequest(tags={RECIPE_TAG: recipe.name})], cursor=cursor)

    return dataset_changed


def watched(recipe: Recipe) -> list[Address]:
    """Every folder and listing that a change of the datasets shows in."""
    return list(dict.fromkeys(path for dataset in recipe.datasets for path in (dataset.root, dataset.path)))


def run_under_way(instance: DagsterInstance, recipe: Recipe) -> str | None:
    """Id of a run of `recipe` that has not ended, queued ones included; None when there is none.

    That is a run of its jobs, or one in which some of its assets were selected by hand.
    """
    of_jobs = RunsFilter(tags={RECIPE_TAG: recipe.name}, statuses=_UNDER_WAY)
    runs = [record.dagster_run for record in instance.get_run_records(of_jobs, limit=1)]
    by_hand = RunsFilter(job_name=IMPLICIT_ASSET_JOB_NAME, statuses=_UNDER_WAY)
    runs += [
        record.dagster_run
        for record in instance.get_run_records(by_hand)
        if any(key.path[0] == recipe.name for key in record.dagster_run.asset_selection or ())
    ]
    return runs[0].run_id if runs else None
