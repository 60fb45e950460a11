"""Observations of a training whose worker process is still running, in a real event log."""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import (
    AssetExecutionContext,
    AssetKey,
    DagsterInstance,
    DagsterInvalidConfigError,
    DagsterRunStatus,
    Output,
    asset,
    build_sensor_context,
    materialize,
    validate_run_config,
)
from PIL import Image

from assets.definitions import build_definitions
from assets.trained_lora import observe_training
from pipeline.recipe import Recipe
from resources.local_launcher import AccelerateLauncher
from tests.refused_events import MESSAGE, events_refused
from tests.small_recipe import small_recipe

ROOT = Path(__file__).resolve().parents[2]
KEY = AssetKey(["flowers", "trained_lora"])

WORKER = """
import json, pathlib, sys, time
from dagster_pipes import open_dagster_pipes
from PIL import Image

pipes = open_dagster_pipes()
folder = pathlib.Path(sys.argv[1]).parent
(folder / "logs").mkdir()
line = {"step": 0, "samples": 4, "loss": 0.5, "learning_rate": 1e-4, "seconds": 0.5, "memory_bytes": 2**30}
(folder / "logs" / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
(folder / "samples").mkdir()
Image.new("RGB", (8, 8)).save(folder / "samples" / "step-00000001-00.png")

end_s = time.monotonic() + 240
while not (folder / "observed").exists() and time.monotonic() < end_s:
    time.sleep(0.05)
pipes.close()
"""
"""A worker that logs one step, draws a preview and then waits until the test has seen its observation."""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "data").mkdir()
    return small_recipe(tmp_path, recache={"enabled": True})


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "worker_under_test.py").write_text(WORKER, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    file = tmp_path / "run" / "order.json"
    file.parent.mkdir()
    job = {"recipe": {"training": {"steps": 100}}, "prompts": ["a cat"]}
    file.write_text(json.dumps(job), encoding="utf-8")
    return file


def train(recipe: Recipe, job_file: Path, instance: DagsterInstance) -> str:
    """Launch the worker in the asset flowers/trained_lora, and return the run's id."""

    @asset(key=KEY)
    def trained_lora(context: AssetExecutionContext, launcher: AccelerateLauncher) -> Iterator[Output[int]]:
        launch = launcher.bind(context, recipe.accelerate, observe_training(context, recipe))
        launch("worker_under_test", job_file)
        yield Output(1)

    result = materialize([trained_lora], resources={"launcher": AccelerateLauncher()}, instance=instance)
    assert result.success
    return result.run_id


class Ticks:
    """Ticks of the sensor `flowers_dataset_changed`."""

    def __init__(self, recipe: Recipe, instance: DagsterInstance) -> None:
        self.repository = build_definitions([recipe]).get_repository_def()
        self.sensor = self.repository.get_sensor_def("flowers_dataset_changed")
        self.instance = instance
        self.cursor: str | None = None

    def num_requests(self) -> int:
        """Evaluate one tick, and return the number of runs that it requests, each of which then succeeds."""
        context = build_sensor_context(
            self.instance, cursor=self.cursor, repository_def=self.repository, sensor_name=self.sensor.name
        )
        result = self.sensor.evaluate_tick(context)
        self.cursor = result.cursor
        requests = result.run_requests or []
        for request in requests:
            job = self.repository.get_job("flowers_cache")
            self.instance.create_run_for_job(job, status=DagsterRunStatus.SUCCESS, tags=request.tags)
        return len(requests)


@pytest.mark.timeout(600)
def test_the_observation_of_a_step_is_in_the_event_log_while_its_worker_runs(
    recipe: Recipe, job_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as instance:
        ticks = Ticks(recipe, instance)
        assert [ticks.num_requests(), ticks.num_requests()] == [0, 1], "new files request one run"
        is_materialized: list[bool] = []

        def wait_for_observation() -> None:
            end_s = time.monotonic() + 240
            while not instance.fetch_observations(KEY, limit=1).records and time.monotonic() < end_s:
                time.sleep(0.1)
            is_materialized.append(instance.get_latest_materialization_event(KEY) is not None)
            (job_file.parent / "observed").touch()

        watcher = threading.Thread(target=wait_for_observation)
        watcher.start()
        run = train(recipe, job_file, instance)
        watcher.join()

        # The step and the picture are in one observation or in two.
        records = instance.fetch_observations(KEY, limit=10, ascending=True).records
        observed = [record.asset_observation.metadata for record in records if record.asset_observation]
        values = {name: value.value for metadata in observed for name, value in metadata.items()}
        assert str(values.pop("previews")).startswith("![previews](data:image/jpeg;base64,")
        numbers = {"step": 1, "steps": 100, "loss": 0.5, "learning_rate": 1e-4, "steps_per_second": 2.0}
        numbers |= {"samples_per_second": 8.0, "memory_gib": 1.0, "previews_step": 1}
        assert values == {**numbers, "dagster_run": run}

        assert is_materialized == [False], "an observation must not count as a materialization"
        (materialization,) = instance.fetch_materializations(KEY, limit=10).records
        assert max(record.storage_id for record in records) < materialization.storage_id
        assert [ticks.num_requests(), ticks.num_requests()] == [0, 0], "an observation requests no run"
        assert [each.job_name for each in instance.get_runs()] == ["__ephemeral_asset_job__", "flowers_cache"]


def test_M8_each_observation_has_the_last_value_of_each_number(
    recipe: Recipe, job_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = job_file.parent
    for name in ("logs", "samples"):
        (folder / name).mkdir()

    @asset(key=KEY)
    def trained_lora(context: AssetExecutionContext) -> None:
        poll = observe_training(context, recipe)(job_file)
        line = {
            "step": 0,
            "samples": 4,
            "loss": 0.5,
            "learning_rate": 1e-4,
            "seconds": 0.5,
            "memory_bytes": 1,
        }
        (folder / "logs" / "metrics.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
        poll(True)
        Image.new("RGB", (8, 8)).save(folder / "samples" / "step-00000001-00.png")
        poll(True)

    with DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as instance:
        assert materialize([trained_lora], instance=instance).success
        records = instance.fetch_observations(KEY, limit=10, ascending=True).records
        first, second = (set(each.asset_observation.metadata) for each in records if each.asset_observation)
    assert {"loss", "learning_rate", "memory_gib"} <= first
    assert second == first | {"previews", "previews_step"}


def test_a_training_ends_well_although_the_event_log_refuses_its_observations(
    recipe: Recipe, job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "dagster"
    home.mkdir()
    (job_file.parent / "observed").touch()  # the worker does not wait

    @asset(key=KEY)
    def trained_lora(context: AssetExecutionContext, launcher: AccelerateLauncher) -> Iterator[Output[int]]:
        launch = launcher.bind(context, recipe.accelerate, observe_training(context, recipe))
        with events_refused(home):
            launch("worker_under_test", job_file)
        yield Output(1)

    with DagsterInstance.local_temp(str(home)) as instance:
        assert materialize(
            [trained_lora], resources={"launcher": AccelerateLauncher()}, instance=instance
        ).success
        assert instance.fetch_observations(KEY, limit=1).records == []
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("WARNING: ")]
    assert warning.startswith("WARNING: no more live observations: ")
    assert MESSAGE in warning


def test_the_settings_of_a_run_have_the_values_of_the_recipe_as_defaults(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, training={"epochs": 3, "lora": {"rank": 4}})
    train_job = build_definitions([recipe]).resolve_job_def("flowers_train")

    def settings(**config: object) -> dict[str, object]:
        run_config = {"ops": {"flowers__trained_lora": {"config": config}}}
        return validate_run_config(train_job, run_config)["ops"]["flowers__trained_lora"]["config"]

    defaults = {"steps": None, "rank": 4, "learning_rate": 1e-4, "seed": 42, "continue_run": None}
    assert settings() == defaults
    given = {"steps": 5, "rank": 8, "learning_rate": 0.5, "seed": 0, "continue_run": "latest"}
    assert settings(**given) == given
    assert settings(rank=None)["rank"] is None
    for wrong in ({"step": 5}, {"rank": "eight"}, {"steps": 0.5}):
        with pytest.raises(DagsterInvalidConfigError):
            settings(**wrong)
