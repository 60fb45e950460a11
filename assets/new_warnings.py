"""Which warnings of a run are new: the ones that the last evaluation of their check did not have."""

from collections.abc import Iterator, Sequence, Set
from itertools import islice

from dagster import (
    AssetCheckSeverity,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    RunRecord,
    RunsFilter,
)

from assets.recipe_runs import continued_runs, selected_assets
from resources.failures import Problem
from resources.run_events import run_entries
from resources.run_names import RECIPE_TAG

_MAX_COMPARED = 100
"""Maximum number of earlier runs, all of them with an asset in question, whose evaluations are read.

A check that none of them has evaluated counts as new.
"""

_PAGE_RUNS = 100
"""Number of runs that one query returns."""


def new_warnings(instance: DagsterInstance, run: DagsterRun) -> list[Problem]:
    """Return the new warnings of a run.

    A warning is new unless the check also failed the last time that an earlier run of the job evaluated it.
    """
    record = instance.get_run_record_by_id(run.run_id)
    assert record is not None  # the sensor has its event
    warnings = _evaluations(instance, continued_runs(instance, record))
    new = {check: problem for check, problem in warnings.items() if problem is not None}

    if not new:
        return []

    # Each check by itself: runs of the job may have executed other assets, steps or checks.
    undecided = set(new)
    assets = {asset for asset, _ in new}
    comparable = (each for each in _earlier_runs(instance, record) if _may_have(each.dagster_run, assets))
    for each in islice(comparable, _MAX_COMPARED):
        earlier = _evaluations(instance, continued_runs(instance, each))
        for check in undecided & earlier.keys():
            undecided.remove(check)
            if earlier[check] is not None:
                del new[check]
        if not undecided:
            break
    return list(new.values())


def _earlier_runs(instance: DagsterInstance, record: RunRecord) -> Iterator[RunRecord]:
    """Yield the successful runs of a run's job and recipe that were created before it, the newest first."""
    run = record.dagster_run
    # Not later ones, which may have ended before the sensor reads this one.
    filters = RunsFilter(
        job_name=run.job_name,
        statuses=[DagsterRunStatus.SUCCESS],
        tags={RECIPE_TAG: run.tags[RECIPE_TAG]} if RECIPE_TAG in run.tags else {},
        created_before=record.create_timestamp,
    )
    cursor: str | None = None
    while page := instance.get_run_records(filters, limit=_PAGE_RUNS, cursor=cursor):
        yield from page
        cursor = page[-1].dagster_run.run_id


def _may_have(run: DagsterRun, assets: Set[str]) -> bool:
    # Runs of assets and checks that somebody selected, of all recipes, share one job.
    selected = {key.to_user_string() for key in selected_assets(run)}
    return not selected or not selected.isdisjoint(assets)


def _evaluations(
    instance: DagsterInstance, runs: Sequence[RunRecord]
) -> dict[tuple[str, str], Problem | None]:
    """Return the last result of each asset and check that a run, or one that it continues, has evaluated.

    It is the problem of a failed warning, and None for all other results.
    """
    results: dict[tuple[str, str], Problem | None] = {}
    for record in runs:
        run_id = record.dagster_run.run_id
        for entry in run_entries(instance, run_id, DagsterEventType.ASSET_CHECK_EVALUATION):
            assert entry.dagster_event is not None
            evaluation = entry.dagster_event.asset_check_evaluation_data
            asset = evaluation.asset_key.to_user_string()
            if evaluation.passed or evaluation.severity != AssetCheckSeverity.WARN:
                results[asset, evaluation.check_name] = None
                continue
            texts = {name: str(value.value) for name, value in evaluation.metadata.items()}
            results[asset, evaluation.check_name] = Problem(
                texts.get("summary", evaluation.check_name),
                f"{asset}, check {evaluation.check_name}",
                texts.get("fix", "see the check in Dagster's UI"),
            )
    return results
