"""The end of a run: its events are read once more, and become the last words of the command that ran it.

A run's resources are taken down when its steps are through, whatever became of them: it succeeded, failed in
an asset, in reading or writing a table, in Dagster itself, or was stopped. So the tables' resource looks.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

from assets.last_words import DEFECT, STOPPED, is_dagster_command, keep, keep_numbers
from pipeline.recipe.gates import SPECS
from resources.run_worker import end_with_code_server
from resources.tables import TableIOManager

if TYPE_CHECKING:
    from pipeline.reporting.summary import CheckResult, RunResult

_LOOKED_AT = {
    DagsterEventType.ASSET_MATERIALIZATION,
    DagsterEventType.ASSET_CHECK_EVALUATION,
    DagsterEventType.STEP_SUCCESS,
    DagsterEventType.STEP_FAILURE,
}


TABLES = "Parquet tables below each recipe's output_dir."


def run_tables(output_dirs: Mapping[str, Path]) -> IOManagerDefinition:
    """The tables' IO manager, and what is done at a run's beginning and said at its end.

    Args:
        output_dirs: `output_dir` by recipe name.
    """

    # Dagster's types leave out generators, which it ends with the run
    @io_manager(config_schema={}, description=TABLES)  # pyright: ignore[reportArgumentType]
    def tables(context: InitResourceContext) -> Iterator[TableIOManager]:
        end_with_code_server()
        try:
            yield TableIOManager(output_dirs)
        finally:
            _keep_end(context, output_dirs)

    return tables


def _keep_end(context: InitResourceContext, output_dirs: Mapping[str, Path]) -> None:
    """Keep the run's numbers and problems for the end of a `dagster` command."""
    run, instance = context.run, context.instance
    if run is None or instance is None or not is_dagster_command(sys.argv):
        return
    ended = ended_run(instance, run.run_id, output_dirs)
    for name, text in ended.numbers.items():
        keep_numbers(name, text)
    for problem in ended.problems:
        keep(problem)


@dataclass(frozen=True)
class EndedRun:
    """What a run came to.

    Attributes:
        numbers: A summary of several lines, by recipe.
        problems: What, where and fix of each failed step, in order; of a stopped run, that it was stopped.
    """

    numbers: dict[str, str]
    problems: list[str]


def ended_run(instance: DagsterInstance, run_id: str, output_dirs: Mapping[str, Path]) -> EndedRun:
    """What the run came to, from its events; `output_dirs` are those of all recipes, by name."""
    from pipeline.reporting.summary import run_summary

    entries = instance.all_logs(run_id, of_type=_LOOKED_AT)
    events = [entry.dagster_event for entry in entries if entry.dagster_event is not None]
    started_s = instance.get_run_stats(run_id).start_time
    problems = [_problem(event, output_dirs, started_s) for event in events if event.is_step_failure]
    if not problems and not _all_steps_succeeded(instance, run_id, events):
        problems = [_stopped("between two steps")]
    run = instance.get_run_by_id(run_id)
    took = f" after {time.time() - started_s:.0f} s" if started_s is not None else ""
    ended = f"{'failed' if problems else 'done'}{took}"
    seen = list(_seen(events, output_dirs))
    numbers = {
        each.recipe: f"{_called(run, run_id, each.recipe)}: {ended}\n{run_summary(each)}" for each in seen
    }
    return EndedRun(numbers, problems)


def _called(run: DagsterRun | None, run_id: str, recipe: str) -> str:
    """The run's job; the recipe where it is one of Dagster's own, for assets without a job."""
    if run is None:
        return run_id
    return recipe if run.job_name.startswith("__") else run.job_name


def _all_steps_succeeded(instance: DagsterInstance, run_id: str, events: Sequence[DagsterEvent]) -> bool:
    run = instance.get_run_by_id(run_id)
    if run is None or run.execution_plan_snapshot_id is None:
        return False
    asked = instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id).step_keys_to_execute
    return set(asked) <= {event.step_key for event in events if event.is_step_success}


def _seen(events: Sequence[DagsterEvent], output_dirs: Mapping[str, Path]) -> Iterator["RunResult"]:
    from pipeline.reporting.summary import RunResult

    for recipe, output_dir in output_dirs.items():
        reports: dict[str, Any] = {}
        checks: list[CheckResult] = []
        for event in events:
            key = event.asset_key
            if event.event_type == DagsterEventType.ASSET_CHECK_EVALUATION:
                key = event.asset_check_evaluation_data.asset_key
            if key is None or key.path[0] != recipe:
                continue
            if event.event_type == DagsterEventType.ASSET_MATERIALIZATION:
                path = output_dir / "reports" / f"{key.path[-1]}.json"
                reports[key.path[-1]] = json.loads(path.read_text(encoding="utf-8"))
            elif event.event_type == DagsterEventType.ASSET_CHECK_EVALUATION:
                checks.append(_check(event))
        if reports or checks:
            yield RunResult(recipe, output_dir, reports, checks)


def _check(event: DagsterEvent) -> "CheckResult":
    from pipeline.reporting.summary import CheckResult

    said = event.asset_check_evaluation_data
    error = said.severity == AssetCheckSeverity.ERROR
    return CheckResult(
        asset=said.asset_key.path[-1],
        name=said.check_name,
        passed=said.passed,
        gate=bool(said.blocking),
        closes=bool(said.blocking) and error and not said.passed,
        text=(said.description or "").split("\n")[0],
    )


def _problem(event: DagsterEvent, output_dirs: Mapping[str, Path], started_s: float | None) -> str:
    """A failed step: its own words, those of what broke it, or that it was stopped.

    Args:
        event: Of the failure.
        output_dirs: By recipe name.
        started_s: When the run began; None if it did not.
    """
    failure = event.step_failure_data
    recipe, asset = _asset_of(str(event.step_key), output_dirs)
    where = f"asset {recipe}/{asset}" if asset else f"step {event.step_key}"
    if failure.error_source.value == "INTERRUPT":
        trained = asset == "trained_lora"
        return _stopped(where, _checkpoint(output_dirs[recipe], started_s or 0.0) if trained else "")
    said = failure.user_failure_data
    if said is not None and "fix" in said.metadata:
        return str(said.description).replace("<recipe>", recipe)
    error = failure.error
    while error is not None and error.cause is not None:
        error = error.cause
    if error is None:
        return f"{where} failed\n  where: {where}\n  fix:   {DEFECT}"
    place = "".join(error.stack[-1:]).strip().split("\n")[0]
    what = error.message.strip().replace("\n", "\n    ")
    return f"{what}\n  where: {where}\n         {place}\n  fix:   {DEFECT}"


def _stopped(where: str, checkpoint: str = "") -> str:
    goes_on = "it goes on from there" if checkpoint else "what is finished is kept"
    place = f"{where}\n         checkpoint {checkpoint}" if checkpoint else where
    return f"Stopped: the run was {STOPPED}\n  where: {place}\n  fix:   start the same job again: {goes_on}"


def _checkpoint(output_dir: Path, since_s: float) -> str:
    """The newest complete checkpoint of the training run that began last; empty where there is none.

    A training run begins by writing its facts; one that began before `since_s` is of another of Dagster's.
    """
    begun = [facts for facts in output_dir.glob("runs/*/run.json") if _modified_s(facts) >= since_s]
    if not begun:
        return ""
    markers = max(begun, key=_modified_s).parent.glob("checkpoints/*/COMPLETE")
    newest = max(markers, key=_modified_s, default=None)
    return str(newest.parent) if newest is not None else ""


def _modified_s(path: Path) -> float:
    return path.stat().st_mtime


def _asset_of(step: str, output_dirs: Mapping[str, Path]) -> tuple[str, str]:
    """Recipe and asset of an asset's step; empty where it is none."""
    for recipe in output_dirs:
        for asset in SPECS:
            if step == f"{recipe}__{asset}":
                return recipe, asset
    return "", ""
