"""Which runs count as one of a recipe, as in progress, as a success or as an attempt."""

from __future__ import annotations

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
)
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.events import AssetMaterializationPlannedData
from dagster._core.execution.api import create_execution_plan, execute_run

from assets import recipe_runs, sensor_state
from assets.recipe_runs import IN_PROGRESS, find_active_run, is_recipe_run
from assets.sensor_state import RETRY_DELAYS_S
from pipeline.recipe import load_recipe
from resources.failures import has_closed_gate
from resources.run_names import RECIPE_TAG
from tests.assets.ticks import ENABLED, Ticks, empty_job, recipe, repository_of
from tests.small_recipe import small_recipe

NOT_ACTIVE = {"SUCCESS", "FAILURE", "CANCELED", "MANAGED"}
"""Statuses of runs that Dagster will not change any more."""


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
            patch.setattr(sensor_state, "RETRY_DELAYS_S", (0.0, 0.0, 0.0))
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
    monkeypatch.setattr(recipe_runs, "LONGEST_START_S", 0.0)
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
    monkeypatch.setattr(recipe_runs, "LONGEST_START_S", 0.0)
    assert ticks.evaluate() == "run"
    assert ticks.attempts == ["1 of 4"]


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
