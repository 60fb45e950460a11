"""The schedule and the sensor, evaluated with a real instance and real folders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster import (
    AssetCheckKey,
    AssetKey,
    DagsterEvent,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    DefaultScheduleStatus,
    DefaultSensorStatus,
    RepositoryDefinition,
    build_schedule_context,
    build_sensor_context,
    job,
)
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.events import AssetMaterializationPlannedData
from dagster._core.execution.api import create_execution_plan, execute_run

from assets import automation
from assets.automation import (
    IN_PROGRESS,
    RETRY_DELAYS_S,
    SensorState,
    find_active_run,
    is_recipe_run,
    recache_schedule,
)
from assets.definitions import build_definitions
from assets.names import ATTEMPT_TAG, RECIPE_TAG
from assets.sources import watched_addresses
from pipeline.raw_images.scan_fingerprint import scan_fingerprint
from pipeline.recipe import Recipe, load_recipe
from resources.failures import has_closed_gate
from tests.small_recipe import small_recipe

NOT_ACTIVE = {"SUCCESS", "FAILURE", "CANCELED", "MANAGED"}
"""Statuses of runs that Dagster will not change any more."""

ENABLED = {"enabled": True}


def recipe(folder: Path, **recache: object) -> Recipe:
    (folder / "data").mkdir(exist_ok=True)
    return small_recipe(folder, recache={"enabled": True, **recache})


def repository_of(recipe: Recipe) -> RepositoryDefinition:
    return build_definitions([recipe]).get_repository_def()


@pytest.fixture
def stored_instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterInstance]:
    """An instance in a folder, which contexts of schedules require."""
    with DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as instance:
        yield instance


@pytest.fixture
def instance() -> Iterator[DagsterInstance]:
    with DagsterInstance.ephemeral() as instance:
        yield instance


class Ticks:
    """Ticks of one sensor, each with the cursor of the previous one."""

    def __init__(self, folder: Path, instance: DagsterInstance) -> None:
        self.repository = repository_of(recipe(folder))
        self.sensor = self.repository.get_sensor_def("flowers_dataset_changed")
        self.instance = instance
        self.cursor: str | None = None
        self.attempts: list[str] = []

    def evaluate(self, status: DagsterRunStatus = DagsterRunStatus.SUCCESS) -> str:
        """Return "run" for a requested run, which then ends in `status`, and the skip reason otherwise."""
        context = build_sensor_context(
            self.instance, cursor=self.cursor, repository_def=self.repository, sensor_name=self.sensor.name
        )
        result = self.sensor.evaluate_tick(context)
        self.cursor = result.cursor
        for request in result.run_requests or []:
            self.attempts.append(request.tags[ATTEMPT_TAG])
            assert request.run_key is None, "with a run key, an earlier state would never run again"
            assert request.tags[RECIPE_TAG] == "flowers"
            self.record("flowers_cache", status)
        return "run" if result.run_requests else str(result.skip_message)

    def record(self, job: str, status: DagsterRunStatus) -> str:
        """Record a run of the recipe that has ended in `status`, and return its id."""
        tags = {RECIPE_TAG: "flowers"}
        job_def = self.repository.get_job(job)
        return self.instance.create_run_for_job(job_def, status=status, tags=tags).run_id


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


def test_O04_O05_a_dataset_that_is_listed_in_slices_runs_once_per_settled_state(
    tmp_path: Path, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automation, "SLICE_S", 0)  # one file per tick
    ticks = Ticks(tmp_path, instance)
    for name in ("a.jpg", "b.jpg", "c.jpg"):
        (tmp_path / "data" / name).write_bytes(b"1")
    listing = [f"listed {number} files so far: the next tick continues" for number in (1, 2, 3)]

    assert [ticks.evaluate() for _ in range(3)] == listing
    assert "settle" in ticks.evaluate()
    assert [ticks.evaluate() for _ in range(3)] == listing
    (tmp_path / "data" / "a.jpg").write_bytes(b"22")  # already listed, so the next listing finds it
    assert ticks.evaluate() == "run"
    assert [ticks.evaluate() for _ in range(3)] == listing
    assert "settle" in ticks.evaluate()
    assert [ticks.evaluate() for _ in range(3)] == listing
    assert ticks.evaluate() == "run"
    assert [ticks.evaluate() for _ in range(3)] == listing
    assert "nothing has changed" in ticks.evaluate()
    assert len(ticks.cursor or "") < 256


def test_a_listing_in_slices_keeps_the_folders_that_it_has_completed(
    tmp_path: Path, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automation, "SLICE_S", 0)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        (folder / "a.jpg").write_bytes(b"1")
    datasets = [{"name": folder.name, "path": folder} for folder in folders]
    ticks = Ticks(tmp_path, instance)
    ticks.repository = repository_of(small_recipe(tmp_path, datasets=datasets, recache=ENABLED))
    ticks.sensor = ticks.repository.get_sensor_def("flowers_dataset_changed")
    reasons = [ticks.evaluate() for _ in range(3)]
    assert ["listed 1 files" in reason for reason in reasons] == [True, True, False]
    first = json.loads(str(ticks.cursor))["seen"]

    # The first folder is complete when a file arrives in it: the next listing finds it.
    assert ["listed 1 files" in ticks.evaluate() for _ in range(2)] == [True, True]
    (folders[0] / "b.jpg").write_bytes(b"2")
    assert ticks.evaluate() == "run"
    assert json.loads(str(ticks.cursor))["seen"] == first
    changed = [ticks.evaluate() for _ in range(4)]
    assert "changing" in changed[-1]


def test_the_cursor_of_an_earlier_version_is_read(tmp_path: Path, instance: DagsterInstance) -> None:
    ticks = Ticks(tmp_path, instance)
    ticks.cursor = '{"seen": "0123456789abcdef", "handled": "0123456789abcdef"}'
    assert "settle" in ticks.evaluate()
    assert ticks.evaluate() == "run"


@pytest.mark.parametrize(
    "cursor",
    ['{"fingerprint": "0123456789abcdef"}', '{"position": {"folder": 3}}', '{"position": 3}', "[]", "run 3"],
)
def test_a_cursor_of_another_version_counts_as_none(cursor: str) -> None:
    assert SensorState.from_cursor(cursor) == SensorState() == SensorState.from_cursor(None)


def test_O06_files_that_return_to_an_older_state_run_again() -> None:
    state, requested = SensorState(), list[str]()
    for now in ["one", "one", "two", "two", "one", "one", "one"]:
        state, reason = state.settle(now, now=0.0)
        if reason is None:
            state, reason = state.after_runs(succeeded=None, failed=[], now=0.0)
            assert reason is None
            requested.append(now)
            state, _ = state.after_runs(succeeded="a run", failed=[], now=0.0)
    assert requested == ["one", "two", "one"]


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


def test_a_change_that_is_reverted_before_it_settles_runs_nothing() -> None:
    state = SensorState("one", "one")
    state, _ = state.settle("two", now=1.0)
    state, reason = state.settle("one", now=2.0)
    assert reason is not None
    assert (state.seen, state.handled) == ("one", "one")


@pytest.mark.parametrize("ended", [DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED])
def test_O14_a_run_that_did_not_succeed_is_tried_again_three_times_with_growing_delays(
    tmp_path: Path, instance: DagsterInstance, ended: DagsterRunStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = Ticks(tmp_path, instance)
    (tmp_path / "data" / "a.jpg").write_bytes(b"1")
    assert "settle" in ticks.evaluate()
    assert ticks.evaluate(ended) == "run"

    for number in range(2, len(RETRY_DELAYS_S) + 2):
        assert f"attempt {number} of 4 at" in ticks.evaluate()
        with monkeypatch.context() as patch:
            patch.setattr(automation, "RETRY_DELAYS_S", (0.0, 0.0, 0.0))
            assert ticks.evaluate(ended) == "run"
    assert "the last of 4 runs with this state" in ticks.evaluate()
    assert ticks.attempts == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]

    # A run that somebody starts after repairing the cause counts.
    ticks.record("flowers_train", DagsterRunStatus.SUCCESS)
    assert "nothing has changed since run" in ticks.evaluate()
    assert "nothing has changed" in ticks.evaluate()


@pytest.mark.parametrize("end", ["PIPELINE_SUCCESS", "PIPELINE_FAILURE", "PIPELINE_CANCELED"])
@pytest.mark.parametrize("selected", ["assets", "steps"])
def test_O14_a_run_of_some_assets_or_steps_and_its_retry_count_neither_as_success_nor_as_attempt(
    tmp_path: Path, instance: DagsterInstance, selected: str, end: str
) -> None:
    ticks = Ticks(tmp_path, instance)
    ticks.evaluate()
    job = ticks.repository.get_job("flowers_cache")
    selection, plan = None, None
    if selected == "assets":
        selection = frozenset({AssetKey(["flowers", "raw_images"])})
        job = job.get_subset(asset_selection=selection)
    else:
        plan = create_execution_plan(job, step_keys_to_execute=["flowers__raw_images"])

    parent: str | None = None
    for tags in ({}, {"dagster/is_resume_retry": "true"}):
        run = instance.create_run_for_job(
            job,
            execution_plan=plan,
            asset_selection=selection,
            parent_run_id=parent,
            root_run_id=parent,
            tags={RECIPE_TAG: "flowers", **tags},
        )
        assert selected == "assets" or run.step_keys_to_execute == ["flowers__raw_images"]
        event = DagsterEvent(event_type_value=end, job_name=run.job_name)
        instance.report_dagster_event(event, run.run_id)
        parent = run.run_id
    assert ticks.evaluate() == "run"
    assert ticks.attempts == ["1 of 4"]


def test_O14_a_gate_that_selected_steps_close_does_not_end_a_change(
    tmp_path: Path, instance: DagsterInstance, tiny_sd: Path
) -> None:
    """The steps read the tables of the images before the change."""
    ticks = Ticks(tmp_path, instance)
    ticks.repository = repository_of(small_recipe(tmp_path, model={"base": tiny_sd}, recache=ENABLED))
    ticks.sensor = ticks.repository.get_sensor_def("flowers_dataset_changed")
    image = tmp_path / "data" / "a.jpg"
    image.write_bytes(b"no image")
    ticks.evaluate()
    job = ticks.repository.get_job("flowers_cache")
    first = job.execute_in_process(instance=instance, raise_on_error=False)
    assert "a check stopped run" in ticks.evaluate()

    image.unlink()
    assert "settle" in ticks.evaluate()
    step = "flowers__validated_dataset"
    again = instance.create_run_for_job(
        job,
        execution_plan=create_execution_plan(job, step_keys_to_execute=[step]),
        parent_run_id=first.run_id,
        root_run_id=first.run_id,
        tags={RECIPE_TAG: "flowers", "dagster/step_selection": step},
    )
    execute_run(InMemoryJob(job), again, instance)
    assert has_closed_gate(instance, again.run_id)
    assert ticks.evaluate() == "run"


@pytest.mark.parametrize("tag", ["dagster/is_resume_retry", "dagster/is_asset_resume_retry"])
def test_O14_retries_are_part_of_one_attempt_and_may_succeed(
    tmp_path: Path, instance: DagsterInstance, tag: str
) -> None:
    ticks = Ticks(tmp_path, instance)
    ticks.evaluate()
    first = ticks.record("flowers_cache", DagsterRunStatus.FAILURE)
    last_steps = ["flowers__vae_latents", "flowers__text_embeddings"]
    plan = create_execution_plan(ticks.repository.get_job("flowers_cache"), step_keys_to_execute=last_steps)

    def retry(status: DagsterRunStatus) -> None:
        instance.create_run_for_job(
            ticks.repository.get_job("flowers_cache"),
            execution_plan=plan,
            parent_run_id=first,
            root_run_id=first,
            status=status,
            tags={RECIPE_TAG: "flowers", tag: "true"},
        )

    retry(DagsterRunStatus.FAILURE)
    assert "attempt 2 of 4 at" in ticks.evaluate()
    retry(DagsterRunStatus.SUCCESS)
    assert "nothing has changed since run" in ticks.evaluate()


def test_O14_selected_steps_of_a_retry_are_no_success(tmp_path: Path, instance: DagsterInstance) -> None:
    ticks = Ticks(tmp_path, instance)
    ticks.evaluate()
    first = ticks.record("flowers_cache", DagsterRunStatus.FAILURE)
    last_assets = [AssetKey(["flowers", name]) for name in ("vae_latents", "text_embeddings")]
    job = ticks.repository.get_job("flowers_cache").get_subset(asset_selection=frozenset(last_assets))
    again = instance.create_run_for_job(
        job,
        asset_selection=frozenset(last_assets),
        parent_run_id=first,
        root_run_id=first,
        status=DagsterRunStatus.FAILURE,
        tags={RECIPE_TAG: "flowers", "dagster/is_asset_resume_retry": "true"},
    )
    step = "flowers__text_embeddings"
    instance.create_run_for_job(
        job,
        execution_plan=create_execution_plan(job, step_keys_to_execute=[step]),
        asset_selection=frozenset(last_assets),
        parent_run_id=again.run_id,
        root_run_id=first,
        status=DagsterRunStatus.SUCCESS,
        # The UI copies the other ones.
        tags={**again.tags, "dagster/step_selection": step},
    )
    assert "failed: attempt 2 of 4" in ticks.evaluate()


def test_O14_a_retry_of_a_run_before_the_change_does_not_count(
    tmp_path: Path, instance: DagsterInstance
) -> None:
    ticks = Ticks(tmp_path, instance)
    ticks.evaluate()
    first = ticks.record("flowers_cache", DagsterRunStatus.FAILURE)
    (tmp_path / "data" / "b.jpg").write_bytes(b"2")
    assert "settle" in ticks.evaluate()
    job = ticks.repository.get_job("flowers_cache")
    instance.create_run_for_job(
        job,
        execution_plan=create_execution_plan(job, step_keys_to_execute=["flowers__vae_latents"]),
        parent_run_id=first,
        root_run_id=first,
        status=DagsterRunStatus.SUCCESS,
        tags={RECIPE_TAG: "flowers", "dagster/is_resume_retry": "true"},
    )
    assert ticks.evaluate() == "run"


@pytest.mark.parametrize("end", ["PIPELINE_SUCCESS", "PIPELINE_FAILURE"])
def test_O14_a_run_that_waited_in_the_queue_counts_although_a_newer_one_ended_before_the_change(
    tmp_path: Path, instance: DagsterInstance, end: str
) -> None:
    ticks = Ticks(tmp_path, instance)
    waiting = ticks.record("flowers_cache", DagsterRunStatus.NOT_STARTED)
    newer = ticks.record("flowers_cache", DagsterRunStatus.NOT_STARTED)

    def report(run: str, *events: str) -> None:
        for kind in events:
            instance.report_dagster_event(DagsterEvent(event_type_value=kind, job_name="flowers_cache"), run)

    report(newer, "PIPELINE_START", "PIPELINE_SUCCESS")
    assert "settle" in ticks.evaluate()
    report(waiting, "PIPELINE_START", end)
    assert f"run {waiting}" in ticks.evaluate()


def test_O14_of_two_failed_runs_the_one_that_ended_last_decides_the_next_attempt(
    tmp_path: Path, instance: DagsterInstance
) -> None:
    ticks = Ticks(tmp_path, instance)
    assert "settle" in ticks.evaluate()
    waiting = ticks.record("flowers_cache", DagsterRunStatus.NOT_STARTED)
    ticks.record("flowers_cache", DagsterRunStatus.FAILURE)
    instance.report_dagster_event(
        DagsterEvent(event_type_value="PIPELINE_FAILURE", job_name="flowers_cache"), waiting
    )
    assert f"run {waiting} failed: attempt 3 of 4" in ticks.evaluate()


def test_O14_trainings_that_fail_are_no_attempts(tmp_path: Path, instance: DagsterInstance) -> None:
    ticks = Ticks(tmp_path, instance)
    ticks.evaluate()
    for _ in range(5):
        ticks.record("flowers_train", DagsterRunStatus.FAILURE)
    assert ticks.evaluate() == "run"


def test_O14_a_success_before_the_change_does_not_count(tmp_path: Path, instance: DagsterInstance) -> None:
    ticks = Ticks(tmp_path, instance)
    ticks.record("flowers_cache", DagsterRunStatus.SUCCESS)
    ticks.evaluate()
    assert ticks.evaluate() == "run"


def test_O14_after_a_closed_gate_only_a_change_of_dataset_or_recipe_starts_a_run(
    tmp_path: Path, instance: DagsterInstance, tiny_sd: Path
) -> None:
    folders = {"output_dir": str(tmp_path / "out"), "cache_dir": str(tmp_path / "cache")}
    values: dict[str, object] = {
        "datasets": [{"name": "photos", "path": str(tmp_path / "data")}],
        "model": {"base": str(tiny_sd)},
        "recache": ENABLED,
        **folders,
    }
    file = tmp_path / "flowers.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    ticks = Ticks(tmp_path, instance)
    ticks.repository = repository_of(load_recipe(file))
    ticks.sensor = ticks.repository.get_sensor_def("flowers_dataset_changed")
    (tmp_path / "data" / "a.jpg").write_bytes(b"no image")
    ticks.evaluate()
    job = ticks.repository.get_job("flowers_cache")
    assert not job.execute_in_process(instance=instance, raise_on_error=False).success
    assert "a check stopped run" in ticks.evaluate()
    assert "nothing has changed" in ticks.evaluate()

    file.write_text(yaml.safe_dump({**values, "checks": {"max_rejected_fraction": 1.0}}), encoding="utf-8")
    assert "settle" in ticks.evaluate()
    assert ticks.evaluate() == "run"

    captions = {"from": "model", "model": "owner/captioner"}
    of_model = {"name": "photos", "path": str(tmp_path / "data"), "captions": captions}
    file.write_text(yaml.safe_dump({**values, "datasets": [of_model]}), encoding="utf-8")
    assert "settle" in ticks.evaluate()
    # As the UI starts it, with the steps of the loaded job.
    loaded = create_execution_plan(job)
    loaded = create_execution_plan(job, step_keys_to_execute=loaded.step_keys_to_execute)
    instance.create_run_for_job(
        job, execution_plan=loaded, status=DagsterRunStatus.SUCCESS, tags={RECIPE_TAG: "flowers"}
    )
    assert ticks.evaluate() == "run", "that run had no captions, which the process of the next one plans"

    file.write_text("datasets: [\n", encoding="utf-8")
    assert "the recipe has a mistake" in ticks.evaluate()


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


def test_O07_the_sensor_waits_for_a_run_of_hand_selected_assets(
    tmp_path: Path, instance: DagsterInstance
) -> None:
    ticks = Ticks(tmp_path, instance)
    ticks.evaluate()
    job = ticks.repository.get_job("__ASSET_JOB")
    selection = frozenset({AssetKey(["flowers", "raw_images"])})
    run = instance.create_run_for_job(job, status=DagsterRunStatus.STARTED, asset_selection=selection)
    assert run.run_id in ticks.evaluate()
    instance.report_run_canceled(run)
    assert ticks.evaluate() == "run"


def test_a_run_of_checks_alone_is_a_run_of_the_recipe(tmp_path: Path) -> None:
    repository = repository_of(recipe(tmp_path))
    check = AssetCheckKey(AssetKey(["flowers", "raw_images"]), "names_unique")
    run = DagsterRun("__ASSET_JOB", asset_check_selection=frozenset({check}))
    assert is_recipe_run(run, repository)
    assert not is_recipe_run(DagsterRun("__ASSET_JOB"), repository)


def test_O14_a_closed_gate_path_isolation_is_not_tried_again(
    tmp_path: Path, instance: DagsterInstance, tiny_sd: Path
) -> None:
    ticks = Ticks(tmp_path, instance)
    (tmp_path / "data" / "a.jpg").write_bytes(b"no image")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    inside_the_dataset = tmp_path / "link" / "out"
    ticks.repository = repository_of(
        small_recipe(tmp_path, model={"base": tiny_sd}, recache=ENABLED, output_dir=inside_the_dataset)
    )
    ticks.sensor = ticks.repository.get_sensor_def("flowers_dataset_changed")
    ticks.evaluate()
    job = ticks.repository.get_job("flowers_cache")
    result = job.execute_in_process(instance=instance, raise_on_error=False)
    (evaluation,) = result.get_asset_check_evaluations()
    assert (evaluation.check_name, evaluation.passed) == ("path_isolation", False)
    assert "a check stopped run" in ticks.evaluate()


@job
def empty_job() -> None:
    """A job without steps, of which runs can be recorded in any status."""


@pytest.mark.parametrize("status", DagsterRunStatus, ids=lambda status: status.name)
def test_O07_a_run_in_every_status_that_can_still_change_is_active(
    tmp_path: Path, instance: DagsterInstance, status: DagsterRunStatus
) -> None:
    is_active = status.name not in NOT_ACTIVE
    assert (status in IN_PROGRESS) == is_active, f"runs in status {status.name} must be active: {is_active}"
    if status == DagsterRunStatus.QUEUED:
        return  # Dagster records such a run only together with a loaded code location
    run = instance.create_run_for_job(empty_job, status=status, tags={RECIPE_TAG: "flowers"})
    expected = run.run_id if is_active else None
    assert find_active_run(instance, recipe(tmp_path), None) == expected, f"a run in status {status.name}"


def test_O07_a_run_of_another_recipe_is_not_active(tmp_path: Path, instance: DagsterInstance) -> None:
    instance.create_run_for_job(empty_job, status=DagsterRunStatus.STARTED, tags={RECIPE_TAG: "flowers2"})
    assert find_active_run(instance, recipe(tmp_path), None) is None


def test_O08_a_run_that_was_killed_before_it_began_is_not_waited_for_forever(
    tmp_path: Path, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Ticks(tmp_path, instance).record("flowers_cache", DagsterRunStatus.NOT_STARTED)
    assert find_active_run(instance, recipe(tmp_path), None) == run
    monkeypatch.setattr(automation, "LONGEST_START_S", 0.0)
    assert find_active_run(instance, recipe(tmp_path), None) is None


@pytest.mark.parametrize("offset_h", [-5, 9])
def test_O08_a_lost_run_is_no_attempt_and_the_time_zone_of_the_database_has_no_effect_on_it(
    tmp_path: Path, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch, offset_h: int
) -> None:
    ticks = Ticks(tmp_path, instance)
    ticks.evaluate()
    run = DagsterRun("flowers_cache", tags={RECIPE_TAG: "flowers"})
    # As PostgreSQL in another time zone notes the creation.
    instance.run_storage.add_historical_run(run, datetime.now(UTC) + timedelta(hours=offset_h))
    planned = AssetMaterializationPlannedData(AssetKey(["flowers", "raw_images"]))
    instance.report_dagster_event(
        DagsterEvent("ASSET_MATERIALIZATION_PLANNED", run.job_name, event_specific_data=planned), run.run_id
    )
    assert run.run_id in ticks.evaluate()
    monkeypatch.setattr(automation, "LONGEST_START_S", 0.0)
    assert ticks.evaluate() == "run"
    assert ticks.attempts == ["1 of 4"]


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


def test_while_a_run_is_in_progress_the_next_listing_starts_at_the_first_file(
    tmp_path: Path, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that change before the end of the run are then seen."""
    monkeypatch.setattr(automation, "SLICE_S", 0)  # one file per tick
    ticks = Ticks(tmp_path, instance)
    (tmp_path / "data" / "a.jpg").write_bytes(b"1")
    assert "listed 1 files" in ticks.evaluate()
    assert "settle" in ticks.evaluate()
    run = instance.create_run_for_job(
        empty_job, status=DagsterRunStatus.STARTED, tags={RECIPE_TAG: "flowers"}
    )
    assert "listed 1 files" in ticks.evaluate()
    assert run.run_id in ticks.evaluate()
    assert json.loads(str(ticks.cursor))["position"] is None


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


def test_L5_a_tick_does_not_load_the_runs_of_other_recipes(
    tmp_path: Path, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        instance.create_run_for_job(empty_job, status=DagsterRunStatus.STARTED, tags={RECIPE_TAG: "other"})
    loaded: list[str] = []
    original = type(instance).get_run_records

    def counting(self: DagsterInstance, *args: Any, **kwargs: Any) -> Any:
        records = original(self, *args, **kwargs)
        loaded.extend(record.dagster_run.run_id for record in records)
        return records

    monkeypatch.setattr(type(instance), "get_run_records", counting)
    assert find_active_run(instance, recipe(tmp_path), None) is None
    assert loaded == []


def test_without_a_cron_expression_no_schedule_exists(tmp_path: Path) -> None:
    assert repository_of(recipe(tmp_path, cron=None)).schedule_defs == []
