"""The schedule and the sensor, evaluated with a real instance and real folders."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from dagster import (
    DagsterInstance,
    DagsterRunStatus,
    DefaultScheduleStatus,
    DefaultSensorStatus,
    build_schedule_context,
    build_sensor_context,
)

from assets.automation import recache_schedule
from assets.sources import watched_addresses
from pipeline.raw_images.scan_fingerprint import scan_fingerprint
from pipeline.recipe import load_recipe
from pipeline.storage.tables import Tables
from resources.run_names import RECIPE_TAG
from tests.assets.ticks import ENABLED, Ticks, recipe, repository_of
from tests.small_recipe import small_recipe


def test_O05_a_change_runs_once_after_it_settled(tmp_path: Path, instance: DagsterInstance) -> None:
    ticks = Ticks(tmp_path, instance)
    assert "settle" in ticks.evaluate()
    (tmp_path / "data" / "a.jpg").write_bytes(b"1")
    assert "settle" in ticks.evaluate()
    (tmp_path / "data" / "b.jpg").write_bytes(b"2")
    assert "settle" in ticks.evaluate()
    assert ticks.evaluate() == "run"
    assert "nothing has changed" in ticks.evaluate()
    assert "nothing has changed" in ticks.evaluate()


@pytest.mark.parametrize("ended", [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE])
def test_O06_a_change_that_is_reverted_after_its_run_began_runs_again(
    tmp_path: Path, instance: DagsterInstance, ended: DagsterRunStatus
) -> None:
    ticks = Ticks(tmp_path, instance)
    assert [ticks.evaluate() for _ in range(3)][1] == "run"
    new = tmp_path / "data" / "new.jpg"
    new.write_bytes(b"1")
    assert "settle" in ticks.evaluate()
    assert ticks.evaluate(ended) == "run"
    # Before the tick that would have seen the end of that run.
    new.unlink()
    assert "settle" in ticks.evaluate()
    assert ticks.evaluate() == "run", "the tables are those of a dataset with the new file"


@pytest.mark.parametrize("listing", ["before the listing", "after the listing", "never listed"])
def test_O06_a_change_that_is_reverted_after_a_run_by_hand_runs_again(
    tmp_path: Path, stored_instance: DagsterInstance, listing: str
) -> None:
    ticks = Ticks(tmp_path, stored_instance)
    assert [ticks.evaluate() for _ in range(3)][1] == "run"
    new = tmp_path / "data" / "new.jpg"
    new.write_bytes(b"1")
    if listing == "after the listing":
        assert "settle" in ticks.evaluate()
    ticks.record("flowers_cache", DagsterRunStatus.SUCCESS)
    if listing == "before the listing":
        assert "settle" in ticks.evaluate()
    new.unlink()
    if listing != "never listed":
        assert "settle" in ticks.evaluate()
    assert ticks.evaluate() == "run", "the tables are those of a dataset with the new file"
    assert all("nothing has changed" in ticks.evaluate() for _ in range(2))


def test_O06_after_a_change_within_one_listing_the_tables_are_of_the_files_again(
    tmp_path: Path, instance: DagsterInstance, tiny_sd: Path
) -> None:
    """Here, a gate stops the run of each state, and no table has an image."""
    ticks = Ticks(tmp_path, instance)
    current = small_recipe(tmp_path, model={"base": tiny_sd}, recache=ENABLED)
    ticks.repository = repository_of(current)
    ticks.sensor = ticks.repository.get_sensor_def("flowers_dataset_changed")
    job = ticks.repository.get_job("flowers_cache")

    def run() -> list[str]:
        job.execute_in_process(instance=instance, raise_on_error=False)
        return Tables(current.output_dir).read_rejected("raw_images")["sample_id"].to_list()

    (tmp_path / "data" / "a.jpg").write_bytes(b"no image")
    ticks.evaluate()
    run()
    assert "a check stopped run" in ticks.evaluate()
    new = tmp_path / "data" / "new.jpg"
    new.write_bytes(b"no image")
    with_new = run()
    new.unlink()
    assert ticks.evaluate(DagsterRunStatus.STARTED) == "run"
    assert (with_new, run()) == (["photos/a.jpg", "photos/new.jpg"], ["photos/a.jpg"])


def test_a_run_by_hand_of_a_change_that_has_been_listed_is_not_repeated(
    tmp_path: Path, stored_instance: DagsterInstance
) -> None:
    ticks = Ticks(tmp_path, stored_instance)
    assert [ticks.evaluate() for _ in range(3)][1] == "run"
    (tmp_path / "data" / "new.jpg").write_bytes(b"1")
    assert "settle" in ticks.evaluate()
    run = ticks.record("flowers_train", DagsterRunStatus.SUCCESS)
    assert ticks.evaluate() == f"nothing has changed since run {run}"


def test_a_run_by_hand_of_unchanged_files_starts_no_further_one(
    tmp_path: Path, stored_instance: DagsterInstance
) -> None:
    ticks = Ticks(tmp_path, stored_instance)
    assert [ticks.evaluate() for _ in range(3)][1] == "run"
    ticks.record("flowers_cache", DagsterRunStatus.SUCCESS)
    assert all("nothing has changed" in ticks.evaluate() for _ in range(2))


def test_O07_sensor_and_schedule_wait_for_a_run_of_the_recipe_and_report_its_id(
    tmp_path: Path, stored_instance: DagsterInstance
) -> None:
    ticks = Ticks(tmp_path, stored_instance)
    ticks.evaluate()
    job = ticks.repository.get_job("flowers_train")
    run = stored_instance.create_run_for_job(
        job, status=DagsterRunStatus.STARTED, tags={RECIPE_TAG: "flowers"}
    )
    assert run.run_id in ticks.evaluate()
    schedule = ticks.repository.get_schedule_def("flowers_recache")
    skipped = schedule.evaluate_tick(build_schedule_context(stored_instance, repository_def=ticks.repository))
    assert run.run_id in str(skipped.skip_message)
    stored_instance.report_run_canceled(run)
    assert ticks.evaluate() == "run"
    tick = schedule.evaluate_tick(build_schedule_context(stored_instance, repository_def=ticks.repository))
    assert [request.tags.get(RECIPE_TAG) for request in tick.run_requests or []] == ["flowers"], tick


@pytest.mark.parametrize(
    "changed", ["list.csv", "images/a.png", "images/a.txt", "masks/a.png", "before/a.png"]
)
def test_O04_the_sensor_watches_a_manifest_and_its_folders_of_images_masks_and_references(
    tmp_path: Path, changed: str
) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    (tmp_path / "before").mkdir()
    for name in ("list.csv", "images/a.png", "images/a.txt", "masks/a.png", "before/a.png"):
        (tmp_path / name).write_text("before")
    dataset = {
        "name": "photos",
        "path": str(tmp_path / "list.csv"),
        "images": str(tmp_path / "images"),
        "mask": {"path": str(tmp_path / "masks")},
        "references": [{"path": str(tmp_path / "before")}],
    }
    watched = watched_addresses(small_recipe(tmp_path, datasets=[dataset]))
    before = scan_fingerprint(watched)
    (tmp_path / changed).write_text("afterwards")
    assert scan_fingerprint(watched) != before, f"a change of {changed} is not visible in {watched}"


def test_a_changed_example_of_a_captioning_model_starts_a_run(
    tmp_path: Path, instance: DagsterInstance
) -> None:
    (tmp_path / "data").mkdir()
    example = tmp_path / "example.png"
    example.write_bytes(b"before")
    captions = {
        "from": "model",
        "model": "owner/captioner",
        "examples": [{"image": str(example), "caption": "a rose"}, {"caption": "a lily"}],
    }
    datasets = [{"name": "photos", "path": tmp_path / "data", "captions": captions}]
    ticks = Ticks(tmp_path, instance)
    ticks.repository = repository_of(small_recipe(tmp_path, datasets=datasets, recache=ENABLED))
    ticks.sensor = ticks.repository.get_sensor_def("flowers_dataset_changed")
    assert [ticks.evaluate() for _ in range(2)][1] == "run"
    assert "nothing has changed" in ticks.evaluate()
    example.write_bytes(b"after")
    assert "settle" in ticks.evaluate()
    assert ticks.evaluate() == "run"


def test_the_sensor_scans_at_the_interval_and_the_schedule_runs_at_the_time_of_the_recipe(
    tmp_path: Path,
) -> None:
    repository = repository_of(recipe(tmp_path, settle_s=77, cron="5 4 * * *", timezone="Asia/Tokyo"))
    actual = {
        "settle_s": repository.get_sensor_def("flowers_dataset_changed").minimum_interval_seconds,
        "cron": repository.get_schedule_def("flowers_recache").cron_schedule,
        "timezone": repository.get_schedule_def("flowers_recache").execution_timezone,
    }
    assert actual == {"settle_s": 77, "cron": "5 4 * * *", "timezone": "Asia/Tokyo"}


def test_the_schedule_and_the_sensor_describe_what_they_start(tmp_path: Path) -> None:
    repository = repository_of(recipe(tmp_path))
    schedule = repository.get_schedule_def("flowers_recache").description
    sensor = repository.get_sensor_def("flowers_dataset_changed").description
    assert schedule == "Brings the cache of flowers up to date, unless one of its runs is in progress."
    assert sensor == "Starts flowers_cache when images, captions or recipe have changed and settled."


def test_a_recipe_that_was_removed_starts_no_run_and_asks_for_a_reload(
    tmp_path: Path, stored_instance: DagsterInstance
) -> None:
    file = tmp_path / "flowers.yaml"
    (tmp_path / "data").mkdir()
    values = small_recipe(tmp_path, recache=ENABLED).model_dump(mode="json", include={"model", "recache"})
    folders = {name: str(tmp_path / name) for name in ("cache_dir", "output_dir")}
    datasets = [{"name": "photos", "path": str(tmp_path / "data")}]
    file.write_text(json.dumps({**values, **folders, "datasets": datasets}), encoding="utf-8")
    ticks = Ticks(tmp_path, stored_instance)
    ticks.repository = repository_of(load_recipe(file))
    ticks.sensor = ticks.repository.get_sensor_def("flowers_dataset_changed")
    ticks.evaluate()
    file.rename(tmp_path / "roses.yaml")
    assert ticks.evaluate() == f"{file} was removed or renamed: reload the code location"
    context = build_schedule_context(
        stored_instance,
        scheduled_execution_time=datetime(2026, 1, 1, 3, tzinfo=UTC),
        repository_def=ticks.repository,
    )
    tick = ticks.repository.get_schedule_def("flowers_recache").evaluate_tick(context)
    assert (tick.run_requests, "reload" in str(tick.skip_message)) == ([], True)
    (tmp_path / "roses.yaml").rename(file)
    assert ticks.evaluate() == "run"


def test_a_recipe_that_the_definitions_would_exclude_starts_no_run(
    tmp_path: Path, instance: DagsterInstance
) -> None:
    """Here, it has taken over the output folder of another recipe since the code location was loaded."""
    (tmp_path / "data").mkdir()

    def write(name: str, output: str) -> Path:
        file = tmp_path / f"{name}.yaml"
        file.write_text(
            f"datasets: [{{name: photos, path: {tmp_path}/data}}]\nmodel: {{base: some/model}}\n"
            f"cache_dir: {tmp_path}/cache\noutput_dir: {tmp_path}/{output}\nrecache: {{enabled: true}}\n",
            "utf-8",
        )
        return file

    write("flowers", "flowers")
    repository = repository_of(load_recipe(write("roses", "roses")))
    sensor = repository.get_sensor_def("roses_dataset_changed")
    schedule = repository.get_schedule_def("roses_recache")
    write("roses", "flowers")
    context = build_sensor_context(instance, repository_def=repository, sensor_name=sensor.name)
    ticks = (
        sensor.evaluate_tick(context),
        schedule.evaluate_tick(build_schedule_context(instance, repository_def=repository)),
    )
    assert ["the recipe has a mistake" in str(tick.skip_message) for tick in ticks] == [True, True]


def test_a_missing_dataset_skips_the_tick(tmp_path: Path, instance: DagsterInstance) -> None:
    ticks = Ticks(tmp_path, instance)
    assert "settle" in ticks.evaluate()
    (tmp_path / "data").rmdir()
    assert "cannot be listed" in ticks.evaluate()
    (tmp_path / "data").mkdir()
    assert ticks.evaluate() == "run", "the state before the failed tick is kept"


def test_a_remote_dataset_that_cannot_be_listed_skips_the_tick(
    tmp_path: Path, instance: DagsterInstance
) -> None:
    ticks = Ticks(tmp_path, instance)
    gone = [{"name": "photos", "path": f"zip://photos::{tmp_path}/gone.zip"}]
    ticks.repository = repository_of(small_recipe(tmp_path, datasets=gone, recache=ENABLED))
    ticks.sensor = ticks.repository.get_sensor_def("flowers_dataset_changed")
    assert "cannot be listed" in ticks.evaluate()


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize(
    ("recache", "schedules", "sensors"),
    [
        ({}, ["flowers_recache"], ["flowers_dataset_changed"]),
        ({"on_change": False}, ["flowers_recache"], []),
        ({"cron": None}, [], ["flowers_dataset_changed"]),
        ({"cron": None, "on_change": False}, [], []),
    ],
    ids=["both", "without the sensor", "without the schedule", "neither"],
)
def test_L3_a_recipe_has_the_schedule_and_the_sensor_that_it_asks_for_and_enabled_starts_them(
    tmp_path: Path, recache: dict[str, Any], schedules: list[str], sensors: list[str], enabled: bool
) -> None:
    repository = repository_of(small_recipe(tmp_path, recache={"enabled": enabled, **recache}))
    running = {each.name: each.default_status for each in repository.schedule_defs}
    status = DefaultScheduleStatus.RUNNING if enabled else DefaultScheduleStatus.STOPPED
    assert running == dict.fromkeys(schedules, status)
    watching = {each.name: each.default_status for each in repository.sensor_defs if each.name != "dead_runs"}
    assert watching == dict.fromkeys(
        sensors, DefaultSensorStatus.RUNNING if enabled else DefaultSensorStatus.STOPPED
    )


def test_L4_the_names_of_recipes_spread_the_minutes_of_their_schedules(tmp_path: Path) -> None:
    recipes = [small_recipe(tmp_path, f"r{number}", recache=ENABLED) for number in range(20)]
    schedules = [recache_schedule(each, "job") for each in recipes]
    assert len({each.cron_schedule for each in schedules if each is not None}) > 10


def test_without_a_cron_expression_no_schedule_exists(tmp_path: Path) -> None:
    assert repository_of(recipe(tmp_path, cron=None)).schedule_defs == []
