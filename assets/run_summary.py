"""The summary that Dagster's command line prints last: what the run did, or what failed, where and its fix.

Dagster ends a failed run with a long stack trace and "Run ... resulted in failure". People and CI read the
last lines, so the summary must follow those. Three hooks are needed for that:

    executor            `summarized_executor` reads the run's events at the end of the executor, however the
                        run ended. This may precede the event of the run's failure. A run that seems to have
                        been stopped is therefore read again at exit.
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
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import click
from dagster import (
    AssetCheckSeverity,
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    InitResourceContext,
    IOManagerDefinition,
    io_manager,
)

from assets.names import RECIPE_TAG
from assets.problems import (
    BUG,
    between_steps_problem,
    command_problem,
    is_interruption,
    step_problem,
    stopped_problem,
    stopped_step_problem,
)
from pipeline.errors import LatentlineError
from pipeline.recipe import Recipe
from pipeline.recipe.check_specs import SPECS
from pipeline.storage.addresses import Url
from resources.run_worker import end_with_code_server, record_machine
from resources.tables import TableIOManager

if TYPE_CHECKING:
    from pipeline.reporting.summary import CheckResult, RunResult

_EVENT_TYPES = {
    DagsterEventType.ASSET_MATERIALIZATION,
    DagsterEventType.ASSET_CHECK_EVALUATION,
    DagsterEventType.STEP_SUCCESS,
    DagsterEventType.STEP_FAILURE,
    DagsterEventType.RUN_FAILURE,
}

_COMMANDS = {"dagster", "python -m dagster", "dg", "python -m dagster_dg_cli.cli"}
"""Names of Dagster's command lines, as click shows them."""

_summaries: dict[str, "RunSummary"] = {}
"""Summary of each run, by its id."""

_output_dirs: dict[str, Mapping[str, Path]] = {}
"""Output folders of all recipes, for each run of this command, by its id."""

_errors: list[tuple[BaseException, str]] = []
"""Errors that ended the command, each with what, where and fix."""


@dataclass(frozen=True)
class RunSummary:
    """The outcome of one run.

    Attributes:
        numbers: Summary of several lines, by recipe.
        problems: What, where and fix of each failed step in order, or of the interruption of the run.
        stopped: True if the run was interrupted.
        is_inferred: True if no event explains the end of the run, which then counts as interrupted.
    """

    numbers: dict[str, str]
    problems: list[str]
    stopped: bool = False
    is_inferred: bool = False


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
        _errors.append((err, problem))

    sys.excepthook = add_problem
    atexit.register(_print_summary)


def run_tables(recipes: Sequence[Recipe]) -> IOManagerDefinition:
    """Return the table IO manager, which also watches the code server."""

    @io_manager(config_schema={}, description="Parquet tables below each recipe's output_dir.")
    def tables(context: InitResourceContext) -> TableIOManager:
        # A step in a process of its own ends with that of the run. Pods record a machine, so that no other
        # machine looks for a process of their run.
        end_with_code_server()
        if context.run is not None and context.instance is not None:
            record_machine(context.instance, context.run.run_id)
        from pipeline.outputs.folder import outputs_of

        return TableIOManager({recipe.name: outputs_of(recipe) for recipe in recipes})

    return tables


def add_summary(instance: DagsterInstance, run_id: str, recipes: Sequence[Recipe]) -> None:
    """Summarize a run for the end of the command, if this process executes a `dagster` or `dg` command.

    A failure, for example of Dagster's database, must not end a run. The run is read again at exit.
    """
    if not in_dagster_command():
        return
    _output_dirs[run_id] = {recipe.name: recipe.output_dir for recipe in recipes}
    with suppress(Exception):
        run = instance.get_run_by_id(run_id)
        remote = [recipe for recipe in recipes if isinstance(recipe.output_address, Url)]
        fetch_reports([recipe for recipe in remote if run is not None and _is_in_run(recipe, run)])
        _summaries[run_id] = summarize_run(instance, run_id, _output_dirs[run_id])


def fetch_reports(recipes: Sequence[Recipe]) -> None:
    """Fetch the reports of recipes with their outputs at an address: steps may have run on other machines.

    If the service does not answer, or the disk is full, the summary lacks the numbers of those steps.
    """
    from pipeline.outputs.folder import outputs_of
    from pipeline.outputs.stage_files import report_file

    for recipe in recipes:
        with suppress(LatentlineError, OSError):
            outputs_of(recipe).fetch(*(report_file(asset) for asset in SPECS))


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
    interrupted = [event for event in failures if _is_interrupted(event)]
    problems = [
        stopped_step_problem(event, output_dirs, started_s, restart)
        if event in interrupted
        else step_problem(event, output_dirs)
        for event in failures
    ]
    stopped, is_inferred = bool(interrupted), False
    if not failures and not _all_steps_succeeded(instance, run, events):
        problems = [between_steps_problem(event) for event in events if _is_error_between_steps(event)]
        stopped = is_inferred = not problems
        problems = problems or [stopped_problem("between two steps", restart)]

    duration = f" after {time.time() - started_s:.0f} s" if started_s is not None else ""
    outcome = "stopped" if stopped else "failed" if problems else "done"
    numbers = {
        result.recipe: f"{_run_title(run, result.recipe)}: {outcome}{duration}\n{run_summary(result)}"
        for result in _run_results(events, output_dirs)
    }
    return RunSummary(numbers, list(dict.fromkeys(problems)), stopped, is_inferred)


def _print_summary() -> None:
    """Print the numbers of a good run to standard output, or everything about a bad one to standard error."""
    for run_id in _output_dirs:
        _read_again(run_id)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()

    # An error of the command explains the end of a run better than an inferred stop. If the run's events
    # explain it, the error repeats them.
    errors = [text for err, text in _errors if not is_interruption(err)]
    summaries = [each for each in _summaries.values() if not (errors and each.is_inferred)]
    problems = [text for summary in summaries for text in summary.problems]
    if not any(summary.problems and not summary.stopped for summary in summaries):
        problems = [*errors, *problems]
    problems = problems or [text for _, text in _errors]
    numbers = [text for summary in summaries for text in summary.numbers.values()]
    write_parts([*numbers, *dict.fromkeys(problems)], sys.stderr if problems else sys.stdout)


def _read_again(run_id: str) -> None:
    """Summarize a run again that has no summary, or whose failure had perhaps not been stored yet."""
    summary = _summaries.get(run_id)
    if summary is not None and not summary.is_inferred:
        return
    try:
        # Without DAGSTER_HOME, the instance of the run no longer exists.
        with DagsterInstance.get() as instance:
            if instance.get_run_by_id(run_id) is not None:
                _summaries[run_id] = summarize_run(instance, run_id, _output_dirs[run_id])
    except Exception as err:
        if summary is None and not _errors:
            reason = f"{type(err).__name__}: {err}".splitlines()[0]
            write_parts([f"warning: the run {run_id} cannot be summarized: {reason}"], sys.stderr)


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


def _is_error_between_steps(event: DagsterEvent) -> bool:
    """Return whether an error ended the run outside of a step; False for a stop."""
    if event.event_type != DagsterEventType.RUN_FAILURE:
        return False
    reason = event.job_failure_data.failure_reason
    return reason is not None and reason.value != "UNEXPECTED_TERMINATION"


def _is_interrupted(event: DagsterEvent) -> bool:
    return event.step_failure_data.error_source.value == "INTERRUPT"
