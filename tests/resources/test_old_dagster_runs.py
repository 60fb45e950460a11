"""Old runs in the history of a real instance in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from dagster import (
    AssetKey,
    AssetObservation,
    AssetsDefinition,
    DagsterInstance,
    DagsterRunStatus,
    MaterializeResult,
    MetadataValue,
    Output,
    StaticPartitionsDefinition,
    asset,
    job,
    materialize,
    op,
)

from resources.old_dagster_runs import delete_run, main, old_runs

TAGS = {"latentline/recipe": "flowers"}


@job
def other() -> None: ...


@pytest.fixture
def instance(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DagsterInstance]:
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    with DagsterInstance.local_temp(str(home)) as instance:
        yield instance


def rose(pictures: str | None) -> AssetsDefinition:
    """Return an asset whose materialization refers to the run with its pictures."""

    @asset
    def rose() -> MaterializeResult[None]:
        shown = {} if pictures is None else {"unchanged_pictures": MetadataValue.dagster_run(pictures)}
        return MaterializeResult(metadata={"text": "x" * 100_000, **shown})

    return rose


def test_the_newest_runs_and_those_of_the_current_state_stay(instance: DagsterInstance) -> None:
    first = materialize([rose(None)], instance=instance, tags=TAGS).run_id
    second, third = (materialize([rose(first)], instance=instance, tags=TAGS).run_id for _ in range(2))
    failed = [
        instance.create_run_for_job(other, tags=TAGS, status=DagsterRunStatus.FAILURE).run_id
        for _ in range(3)
    ]
    active = instance.create_run_for_job(other, tags=TAGS, status=DagsterRunStatus.STARTED).run_id

    assert {run.run_id for run in old_runs(instance, 1)} == {second, *failed[:2]}
    assert {run.run_id for run in old_runs(instance, 0)} == {second, *failed}
    assert old_runs(instance, 3) == []
    assert {first, third, active}.isdisjoint(run.run_id for run in old_runs(instance, 0))


def test_runs_of_other_jobs_and_of_partitions_stay(instance: DagsterInstance) -> None:
    parts = StaticPartitionsDefinition(["a", "b"])

    @asset(partitions_def=parts)
    def theirs() -> None: ...

    for name in ("a", "b"):
        materialize([theirs], partition_key=name, instance=instance, tags=TAGS)
    instance.create_run_for_job(other, status=DagsterRunStatus.FAILURE)
    assert old_runs(instance, 0) == []


def test_the_latest_observation_of_a_source_stays(instance: DagsterInstance) -> None:
    folder = AssetKey("folder")

    @op
    def look() -> Iterator[AssetObservation | Output[None]]:
        yield AssetObservation(folder)
        yield Output(None)

    @job
    def observing() -> None:
        look()

    first, second = (observing.execute_in_process(instance=instance, tags=TAGS).run_id for _ in range(2))
    assert [run.run_id for run in old_runs(instance, 0)] == [first]
    delete_run(instance, first)
    (observation,) = instance.fetch_observations(folder, limit=2).records
    assert observation.run_id == second


def test_the_command_lists_runs_and_deletes_them_only_with_the_option(instance: DagsterInstance) -> None:
    run = instance.create_run_for_job(other, tags=TAGS, status=DagsterRunStatus.FAILURE)
    listed = CliRunner().invoke(main, ["0"], catch_exceptions=False)
    assert f"{run.run_id}  FAILURE   other" in listed.output
    assert "1 old run in" in listed.output
    assert "nothing was deleted" in listed.output
    assert instance.get_run_by_id(run.run_id) is not None

    deleted = CliRunner().invoke(main, ["0", "--delete"], catch_exceptions=False)
    assert "deleted 1 run" in deleted.output
    assert instance.get_run_by_id(run.run_id) is None


def test_the_file_of_a_run_is_in_the_folder_that_dagster_yaml_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, data = tmp_path / "home", tmp_path / "data"
    home.mkdir()
    settings = f"storage: {{sqlite: {{base_dir: {data}}}}}\ntelemetry: {{enabled: false}}\n"
    (home / "dagster.yaml").write_text(settings, encoding="utf-8")
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    with DagsterInstance.from_config(str(home)) as instance:
        run_id = materialize([rose(None)], instance=instance, tags=TAGS).run_id
        (file,) = data.rglob(f"{run_id}.db")
        assert delete_run(instance, run_id) > 100_000
    assert not file.exists()


def test_deleting_a_run_frees_its_file_and_leaves_the_asset_materialized(
    instance: DagsterInstance, home: Path
) -> None:
    first, second = (materialize([rose(None)], instance=instance, tags=TAGS).run_id for _ in range(2))
    file = home / "history" / "runs" / f"{first}.db"
    num_bytes = file.stat().st_size
    assert num_bytes > 100_000
    assert [delete_run(instance, run.run_id) for run in old_runs(instance, 0)] == [num_bytes]
    assert not file.exists()
    assert instance.get_run_by_id(first) is None
    event = instance.get_latest_materialization_event(AssetKey("rose"))
    assert event is not None
    assert event.run_id == second
