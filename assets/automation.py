"""Automatic cache updates: a schedule, a sensor that watches datasets, and one that ends dead runs."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetKey,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    DefaultScheduleStatus,
    DefaultSensorStatus,
    RepositoryDefinition,
    RunRecord,
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

from assets.location import Location
from assets.names import AFTER_CACHE, ATTEMPT_TAG, HIDDEN_JOB, RECIPE_TAG, asset_key
from assets.sources import (
    base_model,
    captioning_models,
    dataset_key,
    example_images,
    new_observations,
    watched_addresses,
)
from assets.step import ALGORITHM_VERSIONS
from pipeline.errors import DatasetError, RecipeError, counted
from pipeline.recipe import RecacheSettings, Recipe, load_recipe
from pipeline.recipe.cron import spread_cron
from pipeline.storage.addresses import Address
from pipeline.storage.needed_columns import STAGE_INPUTS
from resources.dead_runs import end_dead_runs
from resources.failures import has_closed_gate
from resources.run_worker import has_machine
from resources.step_names import step_name
from resources.tables import RECIPE

if TYPE_CHECKING:
    from pipeline.raw_images.scan_fingerprint import ScanPosition

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

_MAX_RUNS = 100
"""Number of a recipe's newest runs among which a tick looks for the ones since a change."""

DEAD_RUNS_S = 30
"""Seconds between two searches for dead runs."""

# Dagster ends a tick after 60 s by default.
SLICE_S = 20.0
"""Seconds for which one tick lists files."""

RETRY_DELAYS_S = (60.0, 300.0, 1800.0)
"""Seconds from the end of a run that did not succeed to the next attempt, for each further attempt."""


@dataclass(frozen=True)
class EndedRun:
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


@dataclass(frozen=True)
class SensorState:
    """State of the sensor between two ticks, stored as JSON in its cursor.

    Attributes:
        seen: State of files and recipe after the last complete listing.
        since: When it was listed first, in seconds since the epoch.
        handled: Last state with which a run has succeeded, or which a gate has rejected; None once another
            one has settled. Files that return to an older state are a change again.
        position: Fields of the `ScanPosition` at which the listing of a large dataset stopped; None between
            two listings.
        listed: Fingerprints of the addresses that a listing in progress has completed.
        observed: Versions of the sources after the last complete listing, by key.
    """

    seen: str | None = None
    handled: str | None = None
    position: dict[str, Any] | None = None
    since: float = 0.0
    listed: dict[str, str] = field(default_factory=dict[str, str])
    observed: dict[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def from_cursor(cls, cursor: str | None) -> "SensorState":
        """Return the state in a cursor; the first state if there is none, or one of another version."""
        if not cursor:
            return cls()
        try:
            state = cls(**json.loads(cursor))
            state.scan_position()
        except (TypeError, ValueError, LookupError):
            return cls()
        return state

    def scan_position(self) -> "ScanPosition | None":
        """Return the position at which the listing stopped."""
        from pipeline.raw_images.scan_fingerprint import ScanPosition

        if self.position is None:
            return None
        # JSON has no tuples.
        fields: Any = {**self.position, "after": tuple(self.position["after"])}
        return ScanPosition(**fields)

    def settle(self, seen: str, *, now: float) -> tuple["SensorState", str | None]:
        """Return the state after a complete listing, and the reason to skip this tick if there is one."""
        # Somebody may still be copying files (FAILURES O05): two listings, `settle_s` apart, must be equal.
        if seen not in {self.seen, self.handled}:
            reason = f"files or recipe are changing (state {seen}): waiting until they settle"
            return SensorState(seen, self.handled, since=now, observed=self.observed), reason

        since = self.since if seen == self.seen else now
        if seen == self.handled:
            reason = "nothing has changed since the last run"
            return SensorState(seen, seen, since=since, observed=self.observed), reason
        # From now on a run may replace the results of the handled state, which is a change if it comes back.
        return SensorState(seen, None, since=since, observed=self.observed), None

    def after_runs(
        self, *, succeeded: str | None, failed: Sequence[EndedRun], now: float
    ) -> tuple["SensorState", str | None]:
        """Return the next state of a settled one, and the reason to skip this tick or None to request a run.

        Args:
            succeeded: Id of a successful run that was created after `since`; None if there is none.
            failed: Runs that began after `since` and ended without success, the last one first.
            now: The time, in seconds since the epoch.
        """
        handled = replace(self, handled=self.seen)
        if succeeded is not None:
            return handled, f"nothing has changed since run {succeeded}"
        if not failed:
            return self, None

        last, attempts = failed[0], counted(len(failed), "run")
        if last.has_closed_gate:
            return (
                handled,
                f"a check stopped run {last.run_id}: a change of dataset or recipe starts the next",
            )

        ended = f"run {last.run_id} {'was cancelled' if last.is_cancelled else 'failed'}"
        if len(failed) > len(RETRY_DELAYS_S):
            return (
                self,
                f"{ended}, the last of {attempts} with this state: repair the cause, then start the job",
            )
        due = last.end_s + RETRY_DELAYS_S[len(failed) - 1]
        if now < due:
            at = datetime.fromtimestamp(due, tz=UTC).strftime("%H:%M:%S")
            return self, f"{ended}: attempt {len(failed) + 1} of {len(RETRY_DELAYS_S) + 1} at {at} UTC"
        return self, None


def recache_schedule(recipe: Recipe, job_name: str) -> ScheduleDefinition | None:
    """Return the schedule `<recipe>_recache` of a job, or None without a cron expression."""
    if recipe.recache.cron is None:
        return None

    @schedule(
        cron_schedule=spread_cron(recipe.recache.cron, recipe.name),
        execution_timezone=recipe.recache.timezone,
        job_name=job_name,
        name=f"{recipe.name}_recache",
        default_status=_schedule_status(recipe.recache),
        description=f"Brings the cache of {recipe.name} up to date, unless one of its runs is in progress.",
    )
    def recache(context: ScheduleEvaluationContext) -> RunRequest | SkipReason:
        active_run = find_active_run(context.instance, recipe, context.repository_def)
        if active_run is not None:
            return SkipReason(f"run {active_run} of this recipe is in progress")
        return RunRequest(tags={RECIPE_TAG: recipe.name})

    return recache


def dataset_sensor(recipe: Recipe, job_name: str) -> SensorDefinition | None:
    """Return the sensor `<recipe>_dataset_changed` of a job, or None without `recache.on_change`."""
    if not recipe.recache.on_change:
        return None

    @sensor(
        job_name=job_name,
        name=f"{recipe.name}_dataset_changed",
        minimum_interval_seconds=recipe.recache.settle_s,
        default_status=_sensor_status(recipe.recache),
        description=f"Starts {recipe.name}_cache when images, captions or recipe have changed and settled.",
    )
    def dataset_changed(context: SensorEvaluationContext) -> SensorResult:
        state = SensorState.from_cursor(context.cursor)
        try:
            # The run too plans its steps from the recipe in the file: Dagster loads the code again for it.
            current = _as_written(recipe)
            # The examples have no source assets, because few recipes have any.
            addresses = [*watched_addresses(current), *example_images(current)]
            state, num_files = _list_files(state, addresses)
        except RecipeError as err:
            return SensorResult(skip_reason=f"the recipe has a mistake: {err}", cursor=context.cursor)
        except (OSError, DatasetError) as err:
            # With the same cursor, the next tick continues where this one began.
            return SensorResult(skip_reason=f"a dataset cannot be listed: {err}", cursor=context.cursor)

        if state.position is not None:
            reason = f"listed {num_files:,} files so far: the next tick continues"
            return SensorResult(skip_reason=reason, cursor=json.dumps(asdict(state)))

        versions = _source_versions(recipe, state.listed)
        observations = new_observations(context.instance, versions, state.observed)
        observed = {key.to_user_string(): version for key, version in versions.items()}
        state, now = replace(state, observed=observed), time.time()
        state, skip_reason = state.settle(_state(current, state.listed), now=now)
        failed: list[EndedRun] = []
        if skip_reason is None:
            active_run = find_active_run(context.instance, recipe, context.repository_def)
            if active_run is not None:
                skip_reason = f"run {active_run} of this recipe is in progress: waiting for its end"
            else:
                succeeded, failed = _ended_runs(context.instance, current, job_name, state.since)
                state, skip_reason = state.after_runs(succeeded=succeeded, failed=failed, now=now)
        cursor = json.dumps(asdict(state))
        if skip_reason is not None:
            return SensorResult(skip_reason=skip_reason, cursor=cursor, asset_events=observations)
        # No run_key: Dagster would never run the same key twice, and files may return to an older state.
        attempt = f"{len(failed) + 1} of {len(RETRY_DELAYS_S) + 1}"
        request = RunRequest(tags={RECIPE_TAG: recipe.name, ATTEMPT_TAG: attempt})
        return SensorResult(run_requests=[request], cursor=cursor, asset_events=observations)

    return dataset_changed


def _as_written(recipe: Recipe) -> Recipe:
    """Return the recipe in its file, which a run would load, and this code server may have loaded earlier."""
    return load_recipe(recipe.source) if recipe.source.is_file() else recipe


def _list_files(state: SensorState, addresses: Sequence[Address]) -> tuple[SensorState, int]:
    """Continue the listing of `addresses` for one tick; also return the number of files of the last one.

    The listing is complete if the new state has no position. Its `listed` then has all addresses.
    """
    from pipeline.raw_images.scan_fingerprint import ScanPosition, scan_slice

    position = state.scan_position()
    end_s = time.monotonic() + SLICE_S
    listed = {str(each): state.listed[str(each)] for each in addresses if str(each) in state.listed}
    for address in addresses:
        if str(address) in listed:
            continue
        result = scan_slice([address], position, seconds=end_s - time.monotonic())
        if isinstance(result, ScanPosition):
            return replace(state, position=asdict(result), listed=listed), result.num_files
        position, listed[str(address)] = None, result
    return replace(state, position=None, listed=listed), 0


def _source_versions(recipe: Recipe, listed: Mapping[str, str]) -> dict[AssetKey, str]:
    """Return the data version of each source asset of the recipe, as far as it has been listed."""
    versions = {
        dataset_key(address): listed[str(address)]
        for address in watched_addresses(recipe)
        if str(address) in listed
    }
    for model in (base_model(recipe), *captioning_models(recipe)):
        # A model on a disk that is away must not hide changes of the datasets.
        with suppress(OSError):
            if (version := model.version()) is not None:
                versions[model.key] = version
    return versions


def _state(recipe: Recipe, files: Mapping[str, str]) -> str:
    """Return 16 hex digits over the listed files, the recipe and the versions of the algorithms."""
    settings = recipe.model_dump_json(exclude={"recache", "owners"})
    return hashlib.sha256(
        repr((sorted(files.items()), settings, ALGORITHM_VERSIONS)).encode("utf-8")
    ).hexdigest()[:16]


def _ended_runs(
    instance: DagsterInstance, recipe: Recipe, cache_job: str, since: float
) -> tuple[str | None, list[EndedRun]]:
    """Return a successful run of the recipe that began after `since`, and failed runs of its cache job.

    The failed run that ended last is the first one. A run of only some assets up to the cache is neither.
    """
    filters = RunsFilter(tags={RECIPE_TAG: recipe.name})
    failed: dict[str, EndedRun] = {}
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
            failed[attempt] = EndedRun(
                run.run_id,
                _ended_s(record),
                is_cancelled=run.status == DagsterRunStatus.CANCELED,
                has_closed_gate=not failed and has_closed_gate(instance, run.run_id),
            )
    return None, list(failed.values())


def _began_s(record: RunRecord) -> float:
    # The creation comes last, and is no filter: PostgreSQL notes it in its own time zone.
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


def _caches_all(run: DagsterRun, recipe: Recipe) -> bool:
    """Return whether a run executes all assets up to the cache: somebody may select some, steps or checks."""
    names = [name for name in (*STAGE_INPUTS, *recipe.optional_assets) if name not in AFTER_CACHE]
    if run.asset_selection or run.asset_check_selection is not None:
        keys = {asset_key(recipe, name) for name in names}
        if not keys <= (run.asset_selection or set[AssetKey]()):
            return False
    steps = {step_name(recipe.name, name) for name in names}
    return run.step_keys_to_execute is None or steps <= set(run.step_keys_to_execute)


def skipping_schedule(
    recipe: str, recache: RecacheSettings, job_name: str, reason: str
) -> ScheduleDefinition | None:
    """Return the schedule of a broken recipe, which starts nothing, or None as `recache_schedule` does."""
    if recache.cron is None:
        return None

    @schedule(
        cron_schedule=spread_cron(recache.cron, recipe),
        execution_timezone=recache.timezone,
        job_name=job_name,
        name=f"{recipe}_recache",
        default_status=_schedule_status(recache),
        description="Starts nothing until the recipe is repaired.",
    )
    def skip(context: ScheduleEvaluationContext) -> SkipReason:
        del context
        return SkipReason(reason)

    return skip


def skipping_sensor(
    recipe: str, recache: RecacheSettings, job_name: str, reason: str
) -> SensorDefinition | None:
    """Return the sensor of a broken recipe, which starts nothing and leaves its cursor unchanged, or None."""
    if not recache.on_change:
        return None

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
    return DefaultSensorStatus.RUNNING if recache.enabled else DefaultSensorStatus.STOPPED


def dead_runs_sensor(location: Location) -> SensorDefinition:
    """Return the sensor that ends the dead runs of the code server's machine."""

    @sensor(
        name=f"{location.prefix}dead_runs",
        minimum_interval_seconds=DEAD_RUNS_S,
        default_status=DefaultSensorStatus.RUNNING,
        description="Marks runs as failed if their process died without reporting it: they would block "
        "others.",
    )
    def dead_runs(context: SensorEvaluationContext) -> SkipReason:
        ended = end_dead_runs(context.instance)
        return SkipReason(f"ended {', '.join(ended)}" if ended else "no dead runs")

    return dead_runs


def find_active_run(
    instance: DagsterInstance, recipe: Recipe, repository: RepositoryDefinition | None
) -> str | None:
    """Return the id of a run of `recipe` that is queued or in progress, or None.

    `repository` has the assets of the recipe.
    """
    for run in _runs_in_progress(instance, tags={RECIPE_TAG: recipe.name}):
        return run.run_id

    # Runs of assets that were selected by hand lack the tag of the recipe's jobs.
    for run in _runs_in_progress(instance, job_name=HIDDEN_JOB):
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

    # Dagster stores the plan of assets and checks with a run. The time of the creation is no measure, because
    # PostgreSQL notes it in its own time zone. Undocumented: no public call returns the events of one run.
    times = [entry.timestamp for entry in instance.all_logs(run.run_id)]
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
