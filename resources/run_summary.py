"""The summary of a run: what it did, or what failed, where and its fix."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster import AssetCheckSeverity, DagsterEvent, DagsterEventType, DagsterInstance

from pipeline.errors import LatentlineError
from pipeline.storage.addresses import Url
from resources.failures import Problem
from resources.run_events import run_entries
from resources.run_names import named_job
from resources.run_problems import RESTART, run_problems
from resources.step_names import step_asset

if TYPE_CHECKING:
    from dagster import RunRecord

    from pipeline.recipe import Recipe
    from pipeline.reporting.summary import CheckResult, RunResult


@dataclass(frozen=True)
class RunSummary:
    """The outcome of one run.

    Attributes:
        numbers: Text of several lines for each recipe; empty if the run was interrupted.
        problems: As in `RunProblems`, and so are `stopped` and `recipe_lines`.
        stopped: True if the run was interrupted.
        recipe_lines: File and line of the recipe for each problem; empty for problems between two steps.
        results: The results behind `numbers`, one for each recipe, also if the run was interrupted.
    """

    numbers: list[str]
    problems: list[Problem]
    stopped: bool = False
    recipe_lines: Mapping[Problem, tuple[str, int]] = field(default_factory=dict[Problem, tuple[str, int]])
    results: Sequence[RunResult] = ()


def summarize_run(
    instance: DagsterInstance,
    run_id: str,
    recipes: Sequence[Recipe],
    *,
    error: BaseException | None = None,
    restart: str = RESTART,
) -> RunSummary:
    """Return the summary of a run that has no more steps to execute; see `run_problems`."""
    found = run_problems(instance, run_id, recipes, error=error, restart=restart)
    results = tuple(_run_results(instance, run_id, recipes))
    # Who stopped a run knows what it did; how to continue must not scroll away.
    shown = () if found.stopped else results
    outcome = "failed" if found.problems else "done"
    numbers = _numbers(instance.get_run_record_by_id(run_id), shown, outcome)
    return RunSummary(numbers, found.problems, found.stopped, found.recipe_lines, results)


def _numbers(record: RunRecord | None, results: Sequence[RunResult], outcome: str) -> list[str]:
    from pipeline.reporting.summary import run_summary

    job = None if record is None else named_job(record.dagster_run)
    started_s = None if record is None else record.start_time
    duration = f" after {time.time() - started_s:.0f} s" if started_s is not None else ""
    return [f"{job or result.recipe}: {outcome}{duration}\n{run_summary(result)}" for result in results]


def _run_results(instance: DagsterInstance, run_id: str, recipes: Sequence[Recipe]) -> Iterator[RunResult]:
    from pipeline.reporting.reports import read_report
    from pipeline.reporting.summary import RunResult

    types = (DagsterEventType.ASSET_MATERIALIZATION, DagsterEventType.ASSET_CHECK_EVALUATION)
    entries = run_entries(instance, run_id, *types)
    events = [entry.dagster_event for entry in entries if entry.dagster_event is not None]
    for recipe in recipes:
        checks: list[CheckResult] = []
        materialized: list[str] = []
        for event in events:
            name, asset = step_asset(event.step_key)
            if name != recipe.name:
                continue
            if event.event_type == DagsterEventType.ASSET_CHECK_EVALUATION:
                checks.append(_check_result(event, asset))
            else:
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
