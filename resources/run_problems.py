"""The problems of a run: of each failed step, or else of what ended the run between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dagster import DagsterEvent, DagsterEventType, DagsterInstance, DagsterRunStatus

from pipeline.recipe.project import path_in_recipe
from pipeline.recipe.sections import ASSET_SECTIONS, section_line
from resources.failures import Problem
from resources.problems import (
    INTERRUPTIONS,
    error_problem,
    step_problem,
    stopped_problem,
    stopped_step_problem,
)
from resources.run_events import run_entries
from resources.step_names import step_asset

if TYPE_CHECKING:
    from dagster import RunRecord

    from pipeline.recipe import Recipe

BETWEEN_STEPS = "between two steps"

RESTART = "start the same job again"


@dataclass(frozen=True)
class RunProblems:
    """What went wrong in a run.

    Attributes:
        problems: The problem of each failed step in order, or of what ended the run; each of them once.
        stopped: True if the run was interrupted.
        recipe_lines: File and line of the recipe for each problem; empty for problems between two steps.
    """

    problems: list[Problem] = field(default_factory=list[Problem])
    stopped: bool = False
    recipe_lines: Mapping[Problem, tuple[str, int]] = field(default_factory=dict[Problem, tuple[str, int]])


def run_problems(
    instance: DagsterInstance,
    run_id: str,
    recipes: Sequence[Recipe],
    *,
    error: BaseException | None = None,
    restart: str = RESTART,
) -> RunProblems:
    """Return the problems of a run that has no more steps to execute.

    `error` is an error or interruption that ends the run and is not an event yet. `restart` is an imperative.
    """
    record = instance.get_run_record_by_id(run_id)
    entries = run_entries(instance, run_id, DagsterEventType.STEP_FAILURE, DagsterEventType.RUN_FAILURE)
    events = [entry.dagster_event for entry in entries if entry.dagster_event is not None]
    failures = [event for event in events if event.is_step_failure]
    if failures:
        return _of_steps(failures, recipes, None if record is None else record.start_time, restart)

    ending = error if error is not None else _ending(record, events, restart)
    if ending is None:
        return RunProblems()
    if isinstance(ending, INTERRUPTIONS):
        return RunProblems([stopped_problem(BETWEEN_STEPS, restart)], stopped=True)
    return RunProblems([problem_between_steps(ending)])


def problem_between_steps(error: Any) -> Problem:
    """Return the problem of an error that ended a run outside of its steps; see `error_problem`."""
    return error if isinstance(error, Problem) else error_problem(error, BETWEEN_STEPS)


def _of_steps(
    failures: Sequence[DagsterEvent], recipes: Sequence[Recipe], started_s: float | None, restart: str
) -> RunProblems:
    output_dirs = {recipe.name: recipe.output_dir for recipe in recipes}
    problems: list[Problem] = []
    recipe_lines: dict[Problem, tuple[str, int]] = {}
    stopped = False
    for event in failures:
        if event.step_failure_data.error_source.value == "INTERRUPT":
            stopped = True
            problems.append(stopped_step_problem(event, output_dirs, started_s, restart))
            continue
        problems.append(step_problem(event, output_dirs))
        if (place := _recipe_line(event, recipes)) is not None:
            recipe_lines[problems[-1]] = place
    return RunProblems(list(dict.fromkeys(problems)), stopped, recipe_lines)


def _recipe_line(event: DagsterEvent, recipes: Sequence[Recipe]) -> tuple[str, int] | None:
    """Return file and line of the section that decides the asset of a step."""
    name, asset = step_asset(event.step_key)
    for recipe in recipes:
        if recipe.name == name and asset in ASSET_SECTIONS:
            return path_in_recipe(recipe.source), section_line(recipe.source, ASSET_SECTIONS[asset])
    return None


def _ending(record: RunRecord | None, events: Sequence[DagsterEvent], restart: str) -> Any:
    """Return the error, interruption or problem that ended a run outside of its steps, or None."""
    ended_badly = {DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED}
    if record is None or record.dagster_run.status not in ended_badly:
        return None

    # Dagster stores an interruption as a failure for this reason, or as a cancellation.
    for event in events:
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
