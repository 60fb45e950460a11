"""Alerts: sensors that send failed runs, new warnings and broken recipes to `LATENTLINE_WEBHOOK`."""

import json
import time
from collections.abc import Callable, Sequence

from dagster import (
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    DefaultSensorStatus,
    RunFailureSensorContext,
    RunRequest,
    RunStatusSensorContext,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    run_failure_sensor,
    run_status_sensor,
    sensor,
)

from assets.location import Location
from assets.new_warnings import new_warnings
from assets.recipe_runs import is_recipe_run, selected_assets
from pipeline.errors import counted
from pipeline.recipe import BrokenRecipe, Recipe
from resources.failures import Problem, has_closed_gate
from resources.run_names import ATTEMPT_TAG, named_job
from resources.run_problems import run_problems
from resources.webhook import Alert, send, webhook

AUTO_RETRY_TAG = "dagster/auto_retry_run_id"
"""Tag of a failed run with the id of the run by which Dagster has started it again."""

WILL_RETRY_TAG = "dagster/will_retry"
"""Tag of a failed run for which a retry by Dagster is due, see `run_retries` in dagster.yaml."""

RETRY_WAIT_S, RETRY_POLL_S = 20.0, 1.0
"""Longest wait for a retry that is due, and pause. Dagster's daemon creates retries every 5 s."""

_MAX_NAMES = 3
"""Maximum number of names in a title."""

RECIPES_S = 60
"""Seconds between two looks at the recipes that were excluded when the code location loaded."""


def alert_sensors(
    recipes: Sequence[Recipe], broken: Sequence[BrokenRecipe], location: Location
) -> list[SensorDefinition]:
    """Return the sensors that send alerts; none without an address, so that the UI shows no idle ones."""
    address = webhook()
    if address is None:
        return []

    return [
        _failure_alerts(recipes, location, address),
        _warning_alerts(location, address),
        _recipe_alerts(broken, location, address),
    ]


def _failure_alerts(recipes: Sequence[Recipe], location: Location, address: str) -> SensorDefinition:
    @run_failure_sensor(
        name=f"{location.prefix}failure_alerts",
        default_status=DefaultSensorStatus.RUNNING,
        description="Sends what failed, where and its fix to LATENTLINE_WEBHOOK.",
    )
    def failure_alerts(context: RunFailureSensorContext) -> list[RunRequest] | None:
        run = context.dagster_run
        # Undocumented: a run status sensor has no public way to its repository.
        if not is_recipe_run(run, context.repository_def):
            return None  # the tick continues with the next run
        if is_retried(context.instance, run.run_id):
            return []  # ends the tick, as in `_sent`: five waits would exceed Dagster's limit of 60 s
        send(failure_alert(context.instance, run, recipes), address)
        return _sent(context)

    return failure_alerts


def _warning_alerts(location: Location, address: str) -> SensorDefinition:
    @run_status_sensor(
        name=f"{location.prefix}warning_alerts",
        run_status=DagsterRunStatus.SUCCESS,
        default_status=DefaultSensorStatus.RUNNING,
        description="Sends the new warnings of each successful run to LATENTLINE_WEBHOOK.",
    )
    def warning_alerts(context: RunStatusSensorContext) -> list[RunRequest] | None:
        run = context.dagster_run
        alert = warning_alert(context.instance, run) if is_recipe_run(run, context.repository_def) else None
        if alert is None:
            return None
        send(alert, address)
        return _sent(context)

    return warning_alerts


def _recipe_alerts(broken: Sequence[BrokenRecipe], location: Location, address: str) -> SensorDefinition:
    @sensor(
        name=f"{location.prefix}recipe_alerts",
        minimum_interval_seconds=RECIPES_S,
        default_status=DefaultSensorStatus.RUNNING,
        description="Sends each recipe that was excluded when the code location loaded, once.",
    )
    def recipe_alerts(context: SensorEvaluationContext) -> SensorResult:
        known = _sent_before(context.cursor)
        new = [each for each in broken if each.summary() not in known]
        if new:
            send(recipe_alert(new), address)
        reason = f"sent {counted(len(new), 'recipe')}" if new else "no recipe was excluded"
        return SensorResult(skip_reason=reason, cursor=json.dumps([each.summary() for each in broken]))

    return recipe_alerts


def _sent_before(cursor: str | None) -> list[str]:
    try:
        known = json.loads(cursor or "[]")
    except ValueError:  # anybody may edit a cursor in the UI
        return []
    return known if isinstance(known, list) else []


def _sent(context: RunStatusSensorContext) -> list[RunRequest]:
    # Any iterable, even an empty one, makes Dagster end the tick after this run and move the cursor behind
    # it. With None, Dagster adds a DagsterRunReaction and evaluates the next of up to five runs before it
    # stores the cursor.
    context.log.info(f"sent an alert about run {context.dagster_run.run_id}")
    return []


def is_retried(
    instance: DagsterInstance,
    run_id: str,
    *,
    wait_s: float = RETRY_WAIT_S,
    sleep: Callable[[float], object] = time.sleep,
) -> bool:
    """Return whether Dagster has retried a failed run; wait up to `wait_s` for a retry that is due."""
    # A retry may turn out to be impossible, for example because the job was removed. No event follows then,
    # and a run failure sensor has no way to look at a run again in a later tick.
    for number in range(1 + round(wait_s / RETRY_POLL_S)):
        if number > 0:
            sleep(RETRY_POLL_S)
        run = instance.get_run_by_id(run_id)
        if run is None or run.tags.get(WILL_RETRY_TAG) != "true":
            return False
        retry = instance.get_run_by_id(run.tags.get(AUTO_RETRY_TAG, ""))
        # A run that was created and not submitted may never start.
        if retry is not None and retry.status != DagsterRunStatus.NOT_STARTED:
            return True
    return False


def failure_alert(instance: DagsterInstance, run: DagsterRun, recipes: Sequence[Recipe]) -> Alert:
    """Return what, where and fix of each failed step, or of what ended the run between two steps."""
    problems = run_problems(instance, run.run_id, recipes).problems
    title = f"{_title(run)} failed"
    # A run that a person executes again has the tags of the first one.
    attempt = None if _is_manual(instance, run) else run.tags.get(ATTEMPT_TAG)
    # After a closed gate, only a change starts the next run.
    if attempt is not None and not has_closed_gate(instance, run.run_id):
        number, _, last = attempt.partition(" of ")
        title += f", attempt {attempt}" + (": no further one follows" if number == last else "")
    return Alert(title, "error", run.run_id, run.job_name, problems)


def _is_manual(instance: DagsterInstance, run: DagsterRun) -> bool:
    """Return whether a person has executed the run, or the one that it repeats, again."""
    while run.parent_run_id is not None:
        parent = instance.get_run_by_id(run.parent_run_id)
        # The UI copies the tags of a run, so only the one of its parent tells who has started it.
        if parent is None or parent.tags.get(AUTO_RETRY_TAG) != run.run_id:
            return True
        run = parent
    return False


def recipe_alert(broken: Sequence[BrokenRecipe]) -> Alert:
    """Return the mistakes of recipes."""
    problems = [Problem(each.error.what, each.error.where, each.error.fix) for each in broken]
    title = f"excluded until repaired: {_listed([each.name for each in broken])}"
    return Alert(title, "error", problems=problems)


def warning_alert(instance: DagsterInstance, run: DagsterRun) -> Alert | None:
    """Return the new warnings of a run; None without such."""
    problems = new_warnings(instance, run)
    if not problems:
        return None
    title = f"{_title(run)} has {counted(len(problems), 'new warning')}"
    return Alert(title, "warning", run.run_id, run.job_name, problems)


def _title(run: DagsterRun) -> str:
    keys = sorted(key.to_user_string() for key in selected_assets(run))
    return named_job(run) or _listed(keys) or run.job_name


def _listed(names: Sequence[str]) -> str:
    # Services refuse long messages.
    return ", ".join(names[:_MAX_NAMES]) + (
        f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    )
