"""`python -m resources.old_dagster_runs N [--delete]`: old runs in Dagster's history, for `latentline gc`."""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import click
from dagster import DagsterInstance, DagsterRun, DagsterRunStatus

from pipeline.errors import counted
from pipeline.escaping import json_text
from resources.run_names import RECIPE_TAG
from resources.run_worker import MACHINE_TAG

ENDED = (DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED)

_PARTITION_TAG = "dagster/partition"

PICTURES_RUN = "unchanged_pictures"
"""Metadata entry of a materialization with the run that has its pictures."""


def old_runs(instance: DagsterInstance, num_kept: int) -> list[DagsterRun]:
    """Return the ended runs of recipes that are not among the newest `num_kept` of their job.

    Runs that Dagster's UI needs for the current state of an asset, or for its pictures, are not old. Runs of
    other jobs of the instance are left alone.
    """
    needed = _needed_runs(instance)
    by_job: dict[str, list[DagsterRun]] = defaultdict(list)
    for record in instance.get_run_records():  # the newest first
        run = record.dagster_run
        if run.status in ENDED and _is_of_recipes(run):
            by_job[run.job_name].append(run)
    return [run for runs in by_job.values() for run in runs[num_kept:] if run.run_id not in needed]


def _is_of_recipes(run: DagsterRun) -> bool:
    # Executed runs of recipes have the machine, and those of the recipes' jobs their recipe. Recipes have no
    # partitions: the run of a partition also holds the state of somebody else's asset.
    return not {RECIPE_TAG, MACHINE_TAG}.isdisjoint(run.tags) and _PARTITION_TAG not in run.tags


def _needed_runs(instance: DagsterInstance) -> set[str]:
    # Without its latest materialization, an asset would count as never materialized, and without its latest
    # observation, a dataset or base model as never observed.
    needed = set[str]()
    for key in instance.get_asset_keys():
        needed.update(record.run_id for record in instance.fetch_observations(key, limit=1).records)
        event = instance.get_latest_materialization_event(key)
        if event is None or event.asset_materialization is None:
            continue
        needed.add(event.run_id)
        if (pictures := event.asset_materialization.metadata.get(PICTURES_RUN)) is not None:
            needed.add(str(pictures.value))
    return needed


def delete_run(instance: DagsterInstance, run_id: str) -> int:
    """Delete a run with its events, and return the bytes of its file."""
    instance.delete_run(run_id)

    # Dagster deletes the rows and leaves the file, which has the size that it had. Only its SQLite storage
    # has a file for each run, in the folder that dagster.yaml may name.
    # Undocumented: no public call returns the file.
    path_of_run = getattr(instance.event_log_storage, "path_for_shard", None)
    if path_of_run is None:
        return 0
    file = Path(path_of_run(run_id))
    num_bytes = 0
    with suppress(FileNotFoundError):  # another process has deleted it
        num_bytes = file.stat().st_size
        file.unlink()
    return num_bytes


@click.command()
@click.argument("num_kept", type=click.IntRange(0))
@click.option("--delete", "do_delete", is_flag=True)
@click.option("--json", "as_json", is_flag=True)
def main(num_kept: int, *, do_delete: bool, as_json: bool) -> None:
    """List, and with --delete remove, runs of Dagster's history, except the newest of each job."""
    with DagsterInstance.get() as instance:
        runs = old_runs(instance, num_kept)
        for run in runs:
            click.echo(f"  {run.run_id}  {run.status.value:8}  {run.job_name}", err=as_json)
        click.echo(f"{counted(len(runs), 'old run')} in {os.environ['DAGSTER_HOME']}", err=as_json)
        num_bytes = None
        if runs and not do_delete:
            click.echo("nothing was deleted; add --delete to delete these runs and their events", err=as_json)
        elif runs:
            num_bytes = sum(delete_run(instance, run.run_id) for run in runs)
            click.echo(f"deleted {counted(len(runs), 'run')}, {num_bytes / 1e6:,.1f} MB", err=as_json)
    if as_json:
        rows = [{"run": run.run_id, "job": run.job_name, "status": run.status.value} for run in runs]
        deleted = None if num_bytes is None else {"runs": len(runs), "bytes": num_bytes}
        click.echo(json_text({"dagster_runs": rows, "deleted": deleted}))


if __name__ == "__main__":
    main()
