"""The summary that Dagster's command line prints last: what the run did, or what failed, where and its fix.

Dagster ends a failed run with a long stack trace and "Run ... resulted in failure". People and CI read the
last lines, so the summary must follow those. Four hooks are needed for that:

    resource teardown   Dagster tears resources down after the last step, however the run ended. `run_tables`
                        reads the run's events then.
    executor            With steps in other processes, the process of the run has no resources.
                        `summarized_executor` reads the run's events at the end of the executor.
    sys.excepthook      An error may end the command without a run: a broken recipe, or a full disk below
                        Dagster's history. Only this hook sees it, because Dagster's CLI does not catch it.
    atexit              Dagster's CLI prints its own last line after all hooks that Dagster offers.
"""

import atexit
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import click
from dagster import (
    AssetCheckSeverity,
    DagsterEvent,
    DagsterEventType,
    DagsterExecutionInterruptedError,
    DagsterInstance,
    DagsterRun,
    InitResourceContext,
    IOManagerDefinition,
    io_manager,
)

from assets.names import RECIPE_TAG
from pipeline.errors import LatentlineError
from pipeline.recipe import Recipe
from pipeline.recipe.gates import SPECS
from pipeline.storage.addresses import Url
from pipeline.storage.os_errors import SQLITE_FIXES, as_file_access_error
from resources.failures import failure_text
from resources.run_worker import end_with_code_server, record_machine
from resources.tables import TableIOManager

if TYPE_CHECKING:
    from pipeline.reporting.summary import CheckResult, RunResult
    from pipeline.storage.mirror import Mirror

BUG = "this is a bug in Latentline or in a package it uses: report it with the traceback above"
STOPPED = "stopped by SIGINT, SIGTERM or Dagster"
FINISHED_WORK = "finished work is kept"

_EVENT_TYPES = {
    DagsterEventType.ASSET_MATERIALIZATION,
    DagsterEventType.ASSET_CHECK_EVALUATION,
    DagsterEventType.STEP_SUCCESS,
    DagsterEventType.STEP_FAILURE,
}

_COMMANDS = {"dagster", "python -m dagster", "dg", "python -m dagster_dg_cli.cli"}
"""Names of Dagster's command lines, as click shows them."""

_summaries: dict[str, "RunSummary"] = {}
"""Newest summary of each run, by its id: Dagster initializes the resources again after the last step."""

_problems: list[str] = []
"""Errors that ended the command without a summary of a run."""


@dataclass(frozen=True)
class RunSummary:
    """The outcome of one run.

    Attributes:
        numbers: Summary of several lines, by recipe.
        problems: What, where and fix of each failed step in order, or of the interruption of the run.
        stopped: True if the run was interrupted.
    """

    numbers: dict[str, str]
    problems: list[str]
    stopped: bool = False


def in_dagster_command() -> bool:
    """Return whether this code runs inside a command of Dagster's CLI, `dagster` or `dg`."""
    context = click.get_current_context(silent=True)
    return context is not None and context.find_root().info_name in _COMMANDS


def print_summary_at_exit() -> None:
    """Print the summary when this process exits, if it executes a `dagster` or `dg` command."""
    if in_dagster_command():
        _register_hooks()


@cache
def _register_hooks() -> None:
    """Register the hooks once: Dagster may load the definitions several times, for some executors."""
    previous_hook = sys.excepthook

    def add_problem(kind: type[BaseException], err: BaseException, trace: TracebackType | None) -> None:
        problem = command_problem(err, " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]))
        if BUG in problem:
            previous_hook(kind, err, trace)
        if not any(summary.problems for summary in _summaries.values()):
            _problems.append(problem)

    sys.excepthook = add_problem
    atexit.register(_print_summary)


def run_tables(recipes: Sequence[Recipe]) -> IOManagerDefinition:
    """Return the table IO manager, which also watches the code server and summarizes the run at its end."""
    output_dirs = {recipe.name: recipe.output_dir for recipe in recipes}
    remote = [recipe for recipe in recipes if isinstance(recipe.output_address, Url)]

    # Dagster accepts a generator, and resumes it at the end of the run, but its annotation omits this.
    @io_manager(  # pyright: ignore[reportArgumentType]
        config_schema={}, description="Parquet tables below each recipe's output_dir."
    )
    def tables(context: InitResourceContext) -> Iterator[TableIOManager]:
        end_with_code_server()
        if context.run is not None and context.instance is not None:
            record_machine(context.instance, context.run.run_id)
        try:
            yield TableIOManager(output_dirs, {recipe.name: partial(_mirror_of, recipe) for recipe in remote})
        finally:
            if context.run is not None and context.instance is not None:
                add_summary(context.instance, context.run.run_id, recipes)

    return tables


def add_summary(instance: DagsterInstance, run_id: str, recipes: Sequence[Recipe]) -> None:
    """Summarize a run for the end of the command, if this process executes a `dagster` or `dg` command."""
    if not in_dagster_command():
        return
    run = instance.get_run_by_id(run_id)
    remote = [recipe for recipe in recipes if isinstance(recipe.output_address, Url)]
    pull_reports([recipe for recipe in remote if run is not None and _is_in_run(recipe, run)])
    output_dirs = {recipe.name: recipe.output_dir for recipe in recipes}
    _summaries[run_id] = summarize_run(instance, run_id, output_dirs)


def pull_reports(recipes: Sequence[Recipe]) -> None:
    """Pull the reports of recipes with their outputs at an address: steps may have run on other machines.

    If the service does not answer, the summary lacks the numbers of those steps.
    """
    for recipe in recipes:
        with suppress(LatentlineError):
            _mirror_of(recipe).pull("reports/*.json", "!reports/*/*")


def _mirror_of(recipe: Recipe) -> "Mirror":
    from pipeline.recipe.outputs import mirror_of

    return mirror_of(recipe)


def _is_in_run(recipe: Recipe, run: DagsterRun) -> bool:
    return (
        any(key.path[0] == recipe.name for key in run.asset_selection or ())
        or run.tags.get(RECIPE_TAG) == recipe.name
    )


def summarize_run(
    instance: DagsterInstance,
    run_id: str,
    output_dirs: Mapping[str, Path],
    *,
    restart: str = "start the same job again",
) -> RunSummary:
    """Read the run's events and return its summary.

    Args:
        instance: Instance that holds the events.
        run_id: Id of a run that has no more steps to execute.
        output_dirs: `output_dir` by recipe name, of all recipes.
        restart: How to continue a stopped run, as an imperative.
    """
    from pipeline.reporting.summary import run_summary

    run = instance.get_run_by_id(run_id)
    entries = instance.all_logs(run_id, of_type=_EVENT_TYPES)
    events = [entry.dagster_event for entry in entries if entry.dagster_event is not None]
    started_s = instance.get_run_stats(run_id).start_time

    failures = [event for event in events if event.is_step_failure]
    interrupted = [event for event in failures if _is_interruption(event)]
    problems = [
        _stopped_step_problem(event, output_dirs, started_s, restart)
        if event in interrupted
        else _step_problem(event, output_dirs)
        for event in failures
    ]
    stopped = bool(interrupted)
    if not failures and not _all_steps_succeeded(instance, run, events):
        problems, stopped = [_stopped_problem("between two steps", restart)], True

    duration = f" after {time.time() - started_s:.0f} s" if started_s is not None else ""
    outcome = "stopped" if stopped else "failed" if problems else "done"
    numbers = {
        result.recipe: f"{_run_title(run, result.recipe)}: {outcome}{duration}\n{run_summary(result)}"
        for result in _run_results(events, output_dirs)
    }
    return RunSummary(numbers, list(dict.fromkeys(problems)), stopped)


_DATABASE_FIX = (
    "check that the database accepts connections from this machine, and `storage` in dagster.yaml; then "
    "start the command again; finished work is kept"
)


def command_problem(err: BaseException, command: str) -> str:
    """Return what, where and fix of an error that ended `command`; the fix is `BUG` if it is unexpected."""
    causes = list(_causes(err))
    for cause in causes:
        if isinstance(cause, LatentlineError):
            return f"{type(cause).__name__}: {cause}"

    if isinstance(err, DagsterExecutionInterruptedError | KeyboardInterrupt):
        fix = f"start it again; {FINISHED_WORK}"
        return f"Stopped: the command was {STOPPED}\n  where: {command}\n  fix:   {fix}"

    home = os.environ.get("DAGSTER_HOME", "")
    where = f"{home} (DAGSTER_HOME)" if home else f"{Path.cwd()} (DAGSTER_HOME is not set)"
    for message, fix in SQLITE_FIXES.items():
        if message in str(err):
            return f"Dagster cannot write its history: {message}\n  where: {where}\n  fix:   {fix}"
    for cause in causes:
        if type(cause).__module__.startswith("sqlalchemy"):
            what = f"Dagster's database cannot be used: {' '.join(str(cause).split())}"
            return f"{what}\n  where: {where}\n  fix:   {_DATABASE_FIX}"

    what = f"{type(err).__name__}: {str(err).strip()}".replace("\n", "\n    ")
    return f"{what}\n  where: {command}\n  fix:   {_command_fix(err)}"


def _causes(err: BaseException) -> Iterator[BaseException]:
    """Yield the error, the error that caused it, and so on."""
    cause: BaseException | None = err
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _command_fix(err: BaseException) -> str:
    access_error = as_file_access_error(err)
    if access_error is not None:
        return access_error.fix
    if type(err).__module__.startswith("dagster"):
        return "compare the command and its configuration with the names in the message"
    return BUG


def _print_summary() -> None:
    """Print the numbers of a good run to standard output, or everything about a bad one to standard error."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    numbers = [text for summary in _summaries.values() for text in summary.numbers.values()]
    problems = [*_problems, *(text for summary in _summaries.values() for text in summary.problems)]
    write_parts([*numbers, *dict.fromkeys(problems)], sys.stderr if problems else sys.stdout)


def write_parts(parts: Sequence[str], stream: TextIO) -> None:
    """Write each part after an empty line."""
    text = "".join(f"\n{part}\n" for part in parts)

    # The stream's encoding may lack a character, and its reader may have gone away.
    with suppress(OSError, ValueError):
        os.write(stream.fileno(), text.encode(stream.encoding or "utf-8", "backslashreplace"))


def _run_title(run: DagsterRun | None, recipe: str) -> str:
    """Return the name of the run's job, or of the recipe for Dagster's hidden job of hand-selected assets."""
    return recipe if run is None or run.job_name.startswith("__") else run.job_name


def _all_steps_succeeded(
    instance: DagsterInstance, run: DagsterRun | None, events: Sequence[DagsterEvent]
) -> bool:
    if run is None or run.execution_plan_snapshot_id is None:
        return False
    planned = instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id).step_keys_to_execute
    return set(planned) <= {event.step_key for event in events if event.is_step_success}


def _run_results(events: Sequence[DagsterEvent], output_dirs: Mapping[str, Path]) -> Iterator["RunResult"]:
    """Yield the reports and checks of each recipe that has any in the run."""
    from pipeline.reporting.reports import read_report
    from pipeline.reporting.summary import RunResult

    for recipe, output_dir in output_dirs.items():
        reports: dict[str, Any] = {}
        checks: list[CheckResult] = []
        for event in events:
            checked = event.event_type == DagsterEventType.ASSET_CHECK_EVALUATION
            key = event.asset_check_evaluation_data.asset_key if checked else event.asset_key
            if key is None or key.path[0] != recipe:
                continue
            if checked:
                checks.append(_check_result(event))
            elif event.event_type == DagsterEventType.ASSET_MATERIALIZATION:
                report = read_report(output_dir, key.path[-1])
                reports |= {} if report is None else {key.path[-1]: report}
        if reports or checks:
            yield RunResult(recipe, output_dir, reports, checks)


def _check_result(event: DagsterEvent) -> "CheckResult":
    from pipeline.reporting.summary import CheckResult

    evaluation = event.asset_check_evaluation_data
    error = evaluation.severity == AssetCheckSeverity.ERROR
    return CheckResult(
        asset=evaluation.asset_key.path[-1],
        name=evaluation.check_name,
        passed=evaluation.passed,
        gate=bool(evaluation.blocking),
        closes=bool(evaluation.blocking) and error and not evaluation.passed,
        text=(evaluation.description or "").split("\n")[0],
    )


def _is_interruption(event: DagsterEvent) -> bool:
    return event.step_failure_data.error_source.value == "INTERRUPT"


def _step_problem(event: DagsterEvent, output_dirs: Mapping[str, Path]) -> str:
    """Return what, where and fix of a failed step."""
    failure = event.step_failure_data
    recipe, _ = _step_asset(event)

    # An error of ours is a Dagster Failure with the three parts (resources/failures.py).
    user_failure = failure.user_failure_data
    text = user_failure and failure_text(str(user_failure.description), user_failure.metadata)
    if text:
        return text.replace("<recipe>", recipe)

    # Anything else is a bug: the innermost error and its line help most.
    where = _step_location(event, output_dirs)
    error = failure.error
    while error is not None and error.cause is not None:
        error = error.cause
    if error is None:
        return f"{where} failed\n  where: {where}\n  fix:   {BUG}"
    line = "".join(error.stack[-1:]).strip().split("\n")[0]
    what = error.message.strip().replace("\n", "\n    ")
    return f"{what}\n  where: {where}\n         {line}\n  fix:   {BUG}"


def _stopped_step_problem(
    event: DagsterEvent, output_dirs: Mapping[str, Path], started_s: float | None, restart: str
) -> str:
    """Return what, where and how to continue for an interrupted step.

    Args:
        event: The failure.
        output_dirs: `output_dir` by recipe name.
        started_s: Start of the run as a Unix time; None if the run never started.
        restart: How to continue, as an imperative.
    """
    recipe, asset = _step_asset(event)
    trains = recipe in output_dirs and asset == "trained_lora"
    checkpoint = _newest_checkpoint(output_dirs[recipe], started_s or 0.0) if trains else None
    return _stopped_problem(_step_location(event, output_dirs), restart, checkpoint)


def _stopped_problem(where: str, restart: str, checkpoint: Path | None = None) -> str:
    if checkpoint is None:
        fix = f"{restart}; {FINISHED_WORK}"
    else:
        where = f"{where}\n         checkpoint {checkpoint}"
        fix = f"{restart}; it resumes from this checkpoint"
    return f"Stopped: the run was {STOPPED}\n  where: {where}\n  fix:   {fix}"


def _step_asset(event: DagsterEvent) -> tuple[str, str]:
    """Return recipe and asset of a step named `<recipe>__<asset>`."""
    recipe, _, asset = str(event.step_key).rpartition("__")
    return recipe, asset


def _step_location(event: DagsterEvent, output_dirs: Mapping[str, Path]) -> str:
    recipe, asset = _step_asset(event)
    is_asset = recipe in output_dirs and asset in SPECS
    return f"asset {recipe}/{asset}" if is_asset else f"step {event.step_key}"


def _newest_checkpoint(output_dir: Path, since_s: float) -> Path | None:
    """Return the newest complete checkpoint of the training run that started last, or None.

    A training run writes run.json when it starts; one from before `since_s` belongs to another Dagster run.
    """
    starts = [file for file in output_dir.glob("runs/*/run.json") if _modified_s(file) >= since_s]
    if not starts:
        return None
    markers = max(starts, key=_modified_s).parent.glob("checkpoints/*/COMPLETE")
    newest = max(markers, key=_modified_s, default=None)
    return newest.parent if newest is not None else None


def _modified_s(path: Path) -> float:
    return path.stat().st_mtime
