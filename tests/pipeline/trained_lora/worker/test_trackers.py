from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import LoggerType
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.errors import TrainingError
from pipeline.recipe import TrainingSettings
from pipeline.recipe.trackers import TrackerName
from pipeline.trained_lora import supported_settings
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from tests.pipeline.trained_lora.project import PROMPTS
from tests.pipeline.trained_lora.runs import run_until

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

RESULTS = {"sample_every": 2, "validate_every": 3, "checkpoint_every": 2}


def shown(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    return events


def test_tensorboard_has_each_step_preview_and_validation_loss_once_also_after_a_resume(
    make_project: Callable[..., Project],
) -> None:
    half = {"photos": {"validation_fraction": 0.5}}
    job = make_project(datasets=half, sample_prompts=PROMPTS, **RESULTS).job()
    assert not run_until(job, 3)[0]
    assert run_until(job)[0]
    layout = RunLayout(job.folder)
    events = shown(layout.metrics.parent)
    metrics = read_metrics(layout.metrics, 6)
    for name in ("loss", "learning_rate", "grad_norm"):
        points = {point.step: point.value for point in events.Scalars(name)}
        assert points == {line["step"] + 1: pytest.approx(line[name], rel=1e-6) for line in metrics}
    assert {"samples_per_second", "memory_bytes", "seconds"} <= set(events.Tags()["scalars"])
    assert sorted({point.step for point in events.Scalars("validation_loss")}) == [0, 3, 6]
    assert [point.step for point in events.Images("samples/00")] == [0, 2, 4, 6]
    assert b'"learning_rate": 0.01' in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


def test_without_trackers_only_json_lines_are_written(make_project: Callable[..., Project]) -> None:
    job = make_project(trackers=(), steps=1).job()
    assert run_until(job)[0]
    logs = RunLayout(job.folder).metrics.parent
    assert {path.suffix for path in logs.iterdir()} == {".jsonl"}


class FakeWandb(ModuleType):
    """The part of the wandb package that accelerate calls, with a record of the calls."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = 0

    def init(self, **arguments: Any) -> FakeWandb:
        self.started = arguments
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def Image(self, path: str) -> str:
        return Path(path).name

    def finish(self) -> None:
        self.finished += 1


def test_wandb_gets_the_run_its_metrics_and_its_previews(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_project(trackers=("wandb",), sample_every=6, sample_prompts=PROMPTS[:1]).job()
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert run_until(job)[0]
    folder = str(RunLayout(job.folder).metrics.parent)
    expected = {"project": "latentline", "name": f"demo-{job.run}", "id": job.run, "resume": "allow"}
    assert wandb.started.items() >= {**expected, "dir": folder}.items()
    assert wandb.started["config"]["name"] == "demo"
    metrics = read_metrics(RunLayout(job.folder).metrics, 6)
    losses = [(step, values["loss"]) for step, values in wandb.logged if "loss" in values]
    assert losses == [(line["step"] + 1, line["loss"]) for line in metrics]
    previews = [(step, values["samples"]) for step, values in wandb.logged if "samples" in values]
    assert previews == [(0, ["step-00000000-00.png"]), (6, ["step-00000006-00.png"])]
    assert wandb.finished == 1


@pytest.mark.filterwarnings("default::DeprecationWarning")  # MLflow 3.17 has SQLAlchemy 2.0 in mind
@pytest.mark.filterwarnings("default::FutureWarning")
def test_mlflow_gets_settings_numbers_and_previews_and_one_run_also_after_a_resume(
    make_project: Callable[..., Project], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs MLflow: pip install mlflow-skinny")
    monkeypatch.chdir(tmp_path)
    address = f"sqlite:///{tmp_path}/mlflow.db"
    job = make_project(
        datasets={"photos": {"validation_fraction": 0.5}},
        trackers=("mlflow",),
        tracker_project="flowers",
        tracker_arguments={"mlflow": {"tracking_uri": address, "description": "two halves"}},
        sample_prompts=PROMPTS[:1],
        **RESULTS,
    ).job()
    assert not run_until(job, 3)[0]
    # A parameter of a run cannot change in MLflow, and this key can change in a resumed run.
    training = job.recipe.training.model_copy(update={"keep_checkpoints": 5})
    job = replace(job, recipe=job.recipe.model_copy(update={"training": training}))
    assert run_until(job)[0]

    client = mlflow.MlflowClient(address)
    (experiment,) = client.search_experiments(filter_string="name = 'flowers'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (f"demo-{job.run}", "FINISHED")
    assert run.data.tags["mlflow.note.content"] == "two halves"
    assert run.data.params["training.learning_rate"] == "0.01"
    assert str(tmp_path) not in str(run.data.params)
    metrics = read_metrics(RunLayout(job.folder).metrics, 6)
    for name in ("loss", "learning_rate"):
        points = {point.step: point.value for point in client.get_metric_history(run.info.run_id, name)}
        assert points == {line["step"] + 1: line[name] for line in metrics}
    validation = client.get_metric_history(run.info.run_id, "validation_loss")
    assert {point.step for point in validation} == {0, 3, 6}
    pictures = [Path(each.path).name for each in client.list_artifacts(run.info.run_id, "images")]
    steps = {int(name.split("+")[2]) for name in pictures if name.endswith(".png")}
    assert steps == {0, 2, 4, 6}


def test_trackio_gets_settings_numbers_and_previews_and_one_run_also_after_a_resume(
    make_project: Callable[..., Project], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="needs Trackio, see docs/outputs.md")
    sqlite_storage = pytest.importorskip("trackio.sqlite_storage")
    quiet = {"auto_log_gpu": False, "auto_log_cpu": False}
    settings = {
        "trackers": ("trackio",),
        "tracker_project": "flowers",
        "tracker_arguments": {"trackio": quiet},
    }
    job = make_project(
        datasets={"photos": {"validation_fraction": 0.5}}, sample_prompts=PROMPTS[:1], **settings, **RESULTS
    ).job()
    assert not run_until(job, 3)[0]
    assert run_until(job)[0]

    (run,) = trackio.Api().runs("flowers")
    assert run.name == f"demo-{job.run}"
    assert run.config["training"]["learning_rate"] == 0.01
    logged = sqlite_storage.SQLiteStorage.get_logs("flowers", run.name)
    metrics = read_metrics(RunLayout(job.folder).metrics, 6)
    for name in ("loss", "learning_rate"):
        points = {point["step"]: point[name] for point in logged if name in point}
        assert points == {line["step"] + 1: line[name] for line in metrics}
    assert {point["step"] for point in logged if "validation_loss" in point} == {0, 3, 6}
    assert {point["step"] for point in logged if "samples/00" in point} == {0, 2, 4, 6}


class FailingWandb(FakeWandb):
    """A server that stops answering after the second step."""

    def log(self, values: dict[str, Any], step: int) -> None:
        if step > 2:
            raise ConnectionError("the server does not answer")
        super().log(values, step)


def test_O18_a_tracker_that_fails_is_a_warning_and_the_training_and_other_trackers_continue(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_project(trackers=("wandb", "tensorboard")).job()
    wandb = FailingWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    finished, lines = run_until(job)
    assert finished
    assert [step for step, _ in wandb.logged] == [1, 2]
    assert len(shown(RunLayout(job.folder).metrics.parent).Scalars("loss")) == 6
    warnings = [line for line in lines if "tracker wandb failed" in line]
    assert len(warnings) == 1
    assert "the server does not answer" in warnings[0]


def test_a_tracker_that_does_not_start_ends_the_training_before_its_first_step(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_project(trackers=("wandb",)).job()
    wandb = FakeWandb()
    monkeypatch.setattr(wandb, "init", lambda **_: 1 / 0)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(TrainingError, match="the tracker wandb does not start: division by zero") as error:
        run_until(job)
    assert "check WANDB_API_KEY" in error.value.fix
    assert read_metrics(RunLayout(job.folder).metrics, 6) == []


def test_a_tracker_that_is_not_installed_is_an_error_before_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = TrainingSettings(trackers=("tensorboard", "mlflow", "comet_ml"))
    specs: dict[str, Any] = {"tensorboard": object(), "mlflow": None, "comet_ml": None}
    monkeypatch.setattr(supported_settings, "find_spec", specs.get)
    with pytest.raises(
        TrainingError, match="2 packages of trackers not installed: mlflow, comet_ml"
    ) as error:
        supported_settings.require_trackers(settings)
    assert "pip install mlflow comet_ml" in error.value.fix
    specs |= {"mlflow": object(), "comet_ml": object()}
    supported_settings.require_trackers(settings)


def test_a_recipe_can_name_every_tracker_of_accelerate() -> None:
    assert set(get_args(TrackerName)) == set(LOGGER_TYPE_TO_CLASS)
    assert set(get_args(TrackerName)) == {str(each) for each in LoggerType} - {"all"}
