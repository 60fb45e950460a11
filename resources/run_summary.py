"""The summary of a run: what it did, or what failed, where and its fix."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dagster import (
    AssetCheckSeverity,
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
)

from pipeline.errors import LatentlineError
from pipeline.escaping import markdown_block, printable_lines, without_secrets
from pipeline.recipe.project import path_in_recipe
from pipeline.recipe.sections import ASSET_SECTIONS, section_line
from pipeline.reporting.colours import coloured
from pipeline.storage.addresses import Url
from resources.failures import Problem
from resources.problems import (
    INTERRUPTIONS,
    error_problem,
    step_problem,
    stopped_problem,
    stopped_step_problem,
)
from resources.step_names import step_asset

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.reporting.summary import CheckResult, RunResult

BETWEEN_STEPS = "between two steps"

_MESSAGE, _PROPERTY = "%\r\n", "%\r\n:,"
"""Characters that GitHub's commands escape in a message and in a property."""

_RECIPE_LINE = re.compile(r"(?P<file>[^\n]+?\.ya?ml):(?P<line>[0-9]+)")

_EVENT_TYPES = {
    DagsterEventType.ASSET_MATERIALIZATION,
    DagsterEventType.ASSET_CHECK_EVALUATION,
    DagsterEventType.STEP_FAILURE,
    DagsterEventType.RUN_FAILURE,
}


@dataclass(frozen=True)
class RunSummary:
    """The outcome of one run.

    Attributes:
        numbers: Text of several lines for each recipe; empty if the run was interrupted or nobody wants them.
        problems: The problem of each failed step in order, or of what ended the run.
        stopped: True if the run was interrupted.
        recipe_lines: File and line of the recipe for each problem; empty for problems between two steps.
        results: The results behind `numbers`, one for each recipe, also if the run was interrupted.
    """

    numbers: list[str]
    problems: list[Problem]
    stopped: bool = False
    recipe_lines: Mapping[Problem, tuple[str, int]] = field(default_factory=dict[Problem, tuple[str, int]])
    results: Sequence[RunResult] = ()


def print_summary(
    instance: DagsterInstance, run_id: str, recipes: Sequence[Recipe], *, error: BaseException | None
) -> None:
    """Print the summary of a run that ends, with all of a bad run on standard error.

    `error` is the error or interruption that ends the run; None after its last step.
    """
    try:
        summary = summarize_run(instance, run_id, recipes, error=error)
    # A summary must not end the run, for example if Dagster's database is away.
    except Exception as err:
        reason = f"{type(err).__name__}: {err}".splitlines()[0]
        warning = f"warning: the run {run_id} cannot be summarized: {reason}"
        problems = (
            [] if error is None or isinstance(error, INTERRUPTIONS) else [str(_problem_between_steps(error))]
        )
        write_parts([warning, *problems], sys.stderr)
        return
    write_summary(summary)


def write_summary(summary: RunSummary) -> None:
    """Write the numbers of a good run to standard output, or all of a bad one to standard error.

    Both also appear on the summary page of GitHub Actions.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    parts = [*summary.numbers, *map(str, summary.problems)]
    write_parts(parts, sys.stderr if summary.problems else sys.stdout)
    _add_to_github_page(parts)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        _annotate(summary)


def _add_to_github_page(parts: Sequence[str]) -> None:
    """Add the parts as a code block to the summary page of a step of GitHub Actions, if this is one."""
    page = os.environ.get("GITHUB_STEP_SUMMARY")
    if page:
        text = "\n\n".join(without_secrets(part) for part in parts)
        with suppress(OSError), Path(page).open("a", encoding="utf-8") as file:
            file.write(f"{markdown_block(text)}\n")


def _annotate(summary: RunSummary) -> None:
    """Write a command of GitHub Actions for each problem, which GitHub shows at a line of the recipe."""
    lines: list[str] = []
    for problem in summary.problems:
        file, number = summary.recipe_lines.get(problem, ("", 0))
        # Errors in a recipe name their line.
        if named := _RECIPE_LINE.match(problem.where):
            file, number = named["file"], int(named["line"])
        place = f"file={_escaped(file, _PROPERTY)},line={number}," if file else ""
        message = _escaped(printable_lines(without_secrets(str(problem))), _MESSAGE)
        lines.append(f"::error {place}title=Latentline::{message}\n")
    with suppress(OSError, ValueError):
        os.write(
            sys.stderr.fileno(), "".join(lines).encode(sys.stderr.encoding or "utf-8", "backslashreplace")
        )


def _escaped(text: str, characters: str) -> str:
    # As GitHub's own toolkit does. % comes first.
    for character in characters:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def write_parts(parts: Sequence[str], stream: TextIO) -> None:
    """Write each part after an empty line."""
    # The error of a bug quotes names and captions as they are.
    text = "".join(f"\n{printable_lines(without_secrets(part))}\n" for part in parts)

    # The stream's encoding may lack a character, and its reader may have gone away.
    with suppress(OSError, ValueError):
        os.write(
            stream.fileno(), coloured(text, stream).encode(stream.encoding or "utf-8", "backslashreplace")
        )


def summarize_run(
    instance: DagsterInstance,
    run_id: str,
    recipes: Sequence[Recipe],
    *,
    error: BaseException | None = None,
    restart: str = "start the same job again",
    problems_only: bool = False,
) -> RunSummary:
    """Return the summary of a run that has no more steps to execute.

    `error` is an error or interruption that ends the run and is not an event yet. `restart` is an imperative.
    With `problems_only`, no report is read, which may have to be fetched from an address.
    """
    from pipeline.reporting.summary import run_summary

    record = instance.get_run_record_by_id(run_id)
    run, started_s = (None, None) if record is None else (record.dagster_run, record.start_time)
    # Undocumented: no public call returns the events of one run.
    entries = instance.all_logs(run_id, of_type=_EVENT_TYPES)
    events = [entry.dagster_event for entry in entries if entry.dagster_event is not None]
    output_dirs = {recipe.name: recipe.output_dir for recipe in recipes}

    failures = [event for event in events if event.is_step_failure]
    interrupted = [event for event in failures if _is_interrupted(event)]
    problems: list[Problem] = []
    recipe_lines: dict[Problem, tuple[str, int]] = {}
    for event in failures:
        if event in interrupted:
            problems.append(stopped_step_problem(event, output_dirs, started_s, restart))
            continue
        problems.append(step_problem(event, output_dirs))
        if (place := _recipe_line(event, recipes)) is not None:
            recipe_lines[problems[-1]] = place
    stopped = bool(interrupted)
    if not failures and (ending := _ending(run, events, error, restart)) is not None:
        stopped = isinstance(ending, INTERRUPTIONS)
        problem = stopped_problem(BETWEEN_STEPS, restart) if stopped else _problem_between_steps(ending)
        problems = [problem]

    if problems_only:
        return RunSummary([], list(dict.fromkeys(problems)), stopped, recipe_lines)
    duration = f" after {time.time() - started_s:.0f} s" if started_s is not None else ""
    outcome = "failed" if problems else "done"
    results = tuple(_run_results(events, recipes))
    # Who stopped a run knows what it did; how to continue must not scroll away.
    numbers = [
        f"{_run_title(run, result.recipe)}: {outcome}{duration}\n{run_summary(result)}"
        for result in (() if stopped else results)
    ]
    return RunSummary(numbers, list(dict.fromkeys(problems)), stopped, recipe_lines, results)


def _recipe_line(event: DagsterEvent, recipes: Sequence[Recipe]) -> tuple[str, int] | None:
    """Return file and line of the section that decides the asset of a step."""
    name, asset = step_asset(event.step_key)
    for recipe in recipes:
        if recipe.name == name and asset in ASSET_SECTIONS:
            return path_in_recipe(recipe.source), section_line(recipe.source, ASSET_SECTIONS[asset])
    return None


def _problem_between_steps(error: Any) -> Problem:
    return error if isinstance(error, Problem) else error_problem(error, BETWEEN_STEPS)


def _ending(
    run: DagsterRun | None, events: Sequence[DagsterEvent], error: BaseException | None, restart: str
) -> Any:
    """Return the error, interruption or problem that ended a run outside of its steps, or None."""
    if error is not None:
        return error
    if run is None or run.status not in {DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED}:
        return None

    # Dagster stores an interruption as a failure for this reason, or as a cancellation.
    for event in events:
        if event.event_type == DagsterEventType.RUN_FAILURE:
            failure = None if event.event_specific_data is None else event.job_failure_data
            reason = None if failure is None else failure.failure_reason
            if failure is not None and (reason is None or reason.value == "UNEXPECTED_TERMINATION"):
                continue

            # A report from outside of the run's process, such as the sensor dead_runs or Dagster's run
            # monitoring, has a message alone.
            if failure is None or failure.error is None:
                message = event.message or "the run has failed without a reason"
                return Problem(message, BETWEEN_STEPS, f"{restart}; finished work is kept")
            return failure.error
    return KeyboardInterrupt()


def _run_title(run: DagsterRun | None, recipe: str) -> str:
    # Dagster's hidden job, of assets that were selected by hand, has a name such as __ASSET_JOB.
    return recipe if run is None or run.job_name.startswith("__") else run.job_name


def _run_results(events: Sequence[DagsterEvent], recipes: Sequence[Recipe]) -> Iterator[RunResult]:
    from pipeline.reporting.reports import read_report
    from pipeline.reporting.summary import RunResult

    for recipe in recipes:
        checks: list[CheckResult] = []
        materialized: list[str] = []
        for event in events:
            name, asset = step_asset(event.step_key)
            if name != recipe.name:
                continue
            if event.event_type == DagsterEventType.ASSET_CHECK_EVALUATION:
                checks.append(_check_result(event, asset))
            elif event.event_type == DagsterEventType.ASSET_MATERIALIZATION:
                materialized.append(asset)

        checked = [f"{asset}_checks" for asset in dict.fromkeys(check.asset for check in checks)]
        _fetch_reports(recipe, [*materialized, *checked])
        reports = {asset: read_report(recipe.output_dir, asset) for asset in materialized}
        written = {asset: report for asset, report in reports.items() if report is not None}
        if written or checks:
            yield RunResult(recipe.name, recipe.output_dir, written, checks)


def _fetch_reports(recipe: Recipe, names: Sequence[str]) -> None:
    from pipeline.outputs.folder import outputs_of
    from pipeline.outputs.stage_files import report_file

    # Steps may have run on other machines.
    if isinstance(recipe.output_address, Url):
        # If the service does not answer, or the disk is full, the summary only lacks numbers of some steps.
        with suppress(LatentlineError, OSError):
            outputs_of(recipe).fetch(*(report_file(name) for name in names))


def _check_result(event: DagsterEvent, asset: str) -> CheckResult:
    from pipeline.reporting.summary import CheckResult

    evaluation = event.asset_check_evaluation_data
    error = evaluation.severity == AssetCheckSeverity.ERROR
    summary = evaluation.metadata.get("summary")
    return CheckResult(
        asset=asset,
        name=evaluation.check_name,
        passed=evaluation.passed,
        gate=bool(evaluation.blocking),
        closes=bool(evaluation.blocking) and error and not evaluation.passed,
        text=str(summary.value).split("\n")[0] if summary else "",
    )


def _is_interrupted(event: DagsterEvent) -> bool:
    return event.step_failure_data.error_source.value == "INTERRUPT"
