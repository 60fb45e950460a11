"""The schedule and the sensor, evaluated against a real instance and real folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import (
    AssetKey,
    DagsterInstance,
    DagsterRunStatus,
    DefaultScheduleStatus,
    DefaultSensorStatus,
    RepositoryDefinition,
    build_schedule_context,
    build_sensor_context,
)

from assets.automation import SensorState
from assets.definitions import build_definitions
from assets.names import RECIPE_TAG
from pipeline.recipe import Recipe, recipe_from_mapping


def recipe(folder: Path, **recache: object) -> Recipe:
    (folder / "data").mkdir(exist_ok=True)
    values = {
        "datasets": [{"name": "photos", "path": folder / "data"}],
        "cache_dir": folder / "cache",
        "output_dir": folder / "out",
        "model": {"base": "models/none"},
        "recache": recache,
    }
    return recipe_from_mapping("flowers", values)


def repository(made: Recipe) -> RepositoryDefinition:
    return build_definitions([made]).get_repository_def()


@pytest.fixture
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterInstance]:
    with DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as made:
        yield made


class Ticks:
    """Looks of one sensor, each with the cursor that the last one left."""

    def __init__(self, folder: Path, instance: DagsterInstance) -> None:
        self.repository = repository(recipe(folder))
        self.sensor = self.repository.get_sensor_def("flowers_dataset_changed")
        self.instance = instance
        self.cursor: str | None = None

    def look(self) -> str:
        """Either "run", or why there is none."""
        context = build_sensor_context(
            self.instance, cursor=self.cursor, repository_def=self.repository, sensor_name=self.sensor.name
        )
        result = self.sensor.evaluate_tick(context)
        self.cursor = result.cursor
        for request in result.run_requests or []:
            assert request.run_key is None, "a run key would keep an earlier state from ever running again"
            assert request.tags[RECIPE_TAG] == "flowers"
        return "run" if result.run_requests else str(result.skip_message)


def test_O05_a_change_runs_once_when_it_has_settled(tmp_path: Path, instance: DagsterInstance) -> None:
    ticks = Ticks(tmp_path, instance)
    assert "settle" in ticks.look()
    (tmp_path / "data" / "a.jpg").write_bytes(b"1")
    assert "settle" in ticks.look()
    (tmp_path / "data" / "b.jpg").write_bytes(b"2")
    assert "settle" in ticks.look()
    assert ticks.look() == "run"
    assert "nothing has changed" in ticks.look()
    assert "nothing has changed" in ticks.look()


def test_O06_a_state_seen_before_runs_again_when_it_comes_back() -> None:
    watch, asked = SensorState(), list[str]()
    for now in ["one", "one", "two", "two", "one", "one", "one"]:
        watch, reason = watch.advance(now, active_run=None)
        asked += [now] if reason is None else []
    assert asked == ["one", "two", "one"]


def test_a_change_that_is_taken_back_before_it_settles_runs_nothing() -> None:
    watch = SensorState("one", "one")
    watch, _ = watch.advance("two", active_run=None)
    watch, reason = watch.advance("one", active_run=None)
    assert reason is not None
    assert watch == SensorState("one", "one")


def test_O07_sensor_and_schedule_wait_for_a_run_of_the_recipe_and_name_it(
    tmp_path: Path, instance: DagsterInstance
) -> None:
    ticks = Ticks(tmp_path, instance)
    ticks.look()
    job = ticks.repository.get_job("flowers_train")
    run = instance.create_run_for_job(job, status=DagsterRunStatus.STARTED, tags={RECIPE_TAG: "flowers"})
    assert run.run_id in ticks.look()
    schedule = ticks.repository.get_schedule_def("flowers_recache")
    skipped = schedule.evaluate_tick(build_schedule_context(instance, repository_def=ticks.repository))
    assert run.run_id in str(skipped.skip_message)
    instance.report_run_canceled(run)
    assert ticks.look() == "run"
    tick = schedule.evaluate_tick(build_schedule_context(instance, repository_def=ticks.repository))
    assert tick.run_requests is not None
    assert len(tick.run_requests) == 1


def test_O07_the_sensor_waits_for_assets_that_were_selected_by_hand(
    tmp_path: Path, instance: DagsterInstance
) -> None:
    ticks = Ticks(tmp_path, instance)
    ticks.look()
    job = ticks.repository.get_job("__ASSET_JOB")
    chosen = frozenset({AssetKey(["flowers", "raw_images"])})
    run = instance.create_run_for_job(job, status=DagsterRunStatus.STARTED, asset_selection=chosen)
    assert run.run_id in ticks.look()
    instance.report_run_canceled(run)
    assert ticks.look() == "run"


def test_a_dataset_that_is_gone_is_a_reason_to_skip(tmp_path: Path, instance: DagsterInstance) -> None:
    ticks = Ticks(tmp_path, instance)
    (tmp_path / "data").rmdir()
    assert "cannot be listed" in ticks.look()


@pytest.mark.parametrize(
    ("recache", "schedule", "sensor"),
    [
        ({}, DefaultScheduleStatus.STOPPED, DefaultSensorStatus.STOPPED),
        ({"enabled": True}, DefaultScheduleStatus.RUNNING, DefaultSensorStatus.RUNNING),
        ({"enabled": True, "on_change": False}, DefaultScheduleStatus.RUNNING, DefaultSensorStatus.STOPPED),
    ],
)
def test_one_switch_for_both_and_both_are_off_by_default(
    tmp_path: Path,
    recache: dict[str, bool],
    schedule: DefaultScheduleStatus,
    sensor: DefaultSensorStatus,
) -> None:
    made = repository(recipe(tmp_path, **recache))
    assert made.get_schedule_def("flowers_recache").default_status == schedule
    assert made.get_sensor_def("flowers_dataset_changed").default_status == sensor


def test_without_cron_there_is_no_schedule(tmp_path: Path) -> None:
    assert repository(recipe(tmp_path, cron=None)).schedule_defs == []
