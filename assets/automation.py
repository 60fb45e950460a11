"""Automatic cache updates: a schedule, a sensor that watches datasets, and one that ends dead runs."""

import hashlib
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from dagster import (
    AssetKey,
    DefaultScheduleStatus,
    DefaultSensorStatus,
    RunRequest,
    ScheduleDefinition,
    ScheduleEvaluationContext,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    schedule,
    sensor,
)

from assets.code_version import ALGORITHM_VERSIONS
from assets.location import Location
from assets.recipe_runs import cached_versions, find_active_run, runs_since
from assets.sensor_state import RETRY_DELAYS_S, SensorState
from assets.sources import (
    base_model,
    captioning_models,
    dataset_key,
    example_images,
    new_observations,
    watched_addresses,
)
from pipeline.errors import DatasetError, RecipeError
from pipeline.models.size_multiple import require_size_multiple
from pipeline.recipe import RecacheSettings, Recipe, load_recipe
from pipeline.recipe.cron import spread_cron
from pipeline.recipe.load import require_own_output
from resources.dead_runs import end_dead_runs
from resources.run_names import ATTEMPT_TAG, RECIPE_TAG

DEAD_RUNS_S = 30
"""Seconds between two searches for dead runs."""


def recache_schedule(recipe: Recipe, job_name: str) -> ScheduleDefinition | None:
    """Return the schedule `<recipe>_recache` of a job, or None without a cron expression."""
    if recipe.recache.cron is None:
        return None
    has_file = recipe.source.is_file()

    @schedule(
        cron_schedule=spread_cron(recipe.recache.cron, recipe.name),
        execution_timezone=recipe.recache.timezone,
        job_name=job_name,
        name=f"{recipe.name}_recache",
        default_status=_schedule_status(recipe.recache),
        description=f"Brings the cache of {recipe.name} up to date, unless one of its runs is in progress.",
    )
    def recache(context: ScheduleEvaluationContext) -> RunRequest | SkipReason:
        if has_file and not recipe.source.is_file():
            return SkipReason(_removed(recipe))
        try:
            _as_written(recipe)
        except RecipeError as err:
            return SkipReason(f"the recipe has a mistake: {err}")
        active_run = find_active_run(context.instance, recipe, context.repository_def)
        if active_run is not None:
            return SkipReason(f"run {active_run} of this recipe is in progress")
        return RunRequest(tags={RECIPE_TAG: recipe.name})

    return recache


def dataset_sensor(recipe: Recipe, job_name: str) -> SensorDefinition | None:
    """Return the sensor `<recipe>_dataset_changed` of a job, or None without `recache.on_change`."""
    if not recipe.recache.on_change:
        return None
    has_file = recipe.source.is_file()

    @sensor(
        job_name=job_name,
        name=f"{recipe.name}_dataset_changed",
        minimum_interval_seconds=recipe.recache.settle_s,
        default_status=_sensor_status(recipe.recache),
        description=f"Starts {recipe.name}_cache when images, captions or recipe have changed and settled.",
    )
    def dataset_changed(context: SensorEvaluationContext) -> SensorResult:
        if has_file and not recipe.source.is_file():
            return SensorResult(skip_reason=_removed(recipe), cursor=context.cursor)
        try:
            # The run too plans its steps from the recipe in the file: Dagster loads the code again for it.
            current = _as_written(recipe)
            # The examples have no source assets, because few recipes have any.
            addresses = [*watched_addresses(current), *example_images(current)]
            state, num_files = SensorState.from_cursor(context.cursor).list_further(addresses)
        except RecipeError as err:
            return SensorResult(skip_reason=f"the recipe has a mistake: {err}", cursor=context.cursor)
        except (OSError, DatasetError) as err:
            # With the same cursor, the next tick continues where this one began.
            return SensorResult(skip_reason=f"a dataset cannot be listed: {err}", cursor=context.cursor)

        if state.position is not None:
            reason = f"listed {num_files:,} files so far: the next tick continues"
            return SensorResult(skip_reason=reason, cursor=state.to_cursor())

        return _after_listing(context, state, recipe, current, job_name)

    return dataset_changed


def _removed(recipe: Recipe) -> str:
    # The process of a run loads the definitions again, and would not find the job. Recipes that were built in
    # Python have never had a file.
    return f"{recipe.source} was removed or renamed: reload the code location"


def _after_listing(
    context: SensorEvaluationContext, state: SensorState, recipe: Recipe, current: Recipe, job_name: str
) -> SensorResult:
    """Return the result of a tick that has completed a listing: observations of sources, and a run if due.

    `current` is the recipe in the file of `recipe`, which is the one of the definitions.
    """
    # Of the loaded recipe, because the source assets are those of the loaded definitions.
    versions = _source_versions(recipe, state.listed)
    observations = new_observations(context.instance, versions, state.observed)
    state = replace(state, observed={key.to_user_string(): each for key, each in versions.items()})

    state, skip_reason, num_failed = _decide(context, state, current, job_name)
    cursor = state.to_cursor()
    if skip_reason is not None:
        return SensorResult(skip_reason=skip_reason, cursor=cursor, asset_events=observations)
    # No run_key: Dagster would never run the same key twice, and files may return to an older state.
    attempt = f"{num_failed + 1} of {len(RETRY_DELAYS_S) + 1}"
    request = RunRequest(tags={RECIPE_TAG: recipe.name, ATTEMPT_TAG: attempt})
    return SensorResult(run_requests=[request], cursor=cursor, asset_events=observations)


def _decide(
    context: SensorEvaluationContext, state: SensorState, recipe: Recipe, job_name: str
) -> tuple[SensorState, str | None, int]:
    """Return the state after a complete listing, why no run is due or None, and the number of failed runs."""
    now = time.time()
    state = state.after_tables(cached_versions(context.instance, recipe), now=now)
    state, skip_reason = state.settle(_state(recipe, state.listed), now=now)
    if skip_reason is not None:
        return state, skip_reason, 0
    active_run = find_active_run(context.instance, recipe, context.repository_def)
    if active_run is not None:
        return state, f"run {active_run} of this recipe is in progress: waiting for its end", 0
    succeeded, failed = runs_since(context.instance, recipe, job_name, state.since)
    state, skip_reason = state.after_runs(succeeded=succeeded, failed=failed, now=now)
    return state, skip_reason, len(failed)


def _as_written(recipe: Recipe) -> Recipe:
    """Return the recipe in its file, which a run would load, and this code server may have loaded earlier."""
    if not recipe.source.is_file():
        return recipe
    written = load_recipe(recipe.source)
    # As the definitions do: a run of a recipe that they exclude fails without a step.
    require_size_multiple([written])
    require_own_output(written)
    return written


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
