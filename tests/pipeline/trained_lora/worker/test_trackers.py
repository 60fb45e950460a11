from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.errors import TrainingError
from pipeline.recipe import TrainingSettings
from pipeline.trained_lora import supported_settings
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from tests.pipeline.trained_lora.project import PROMPTS
from tests.pipeline.trained_lora.runs import run_until

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def shown(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    return events


def test_tensorboard_has_each_step_preview_and_validation_loss_once_also_after_a_resume(
    make_project: Callable[..., Project],
) -> None:
    half = {"photos": {"validation_fraction": 0.5}}
    settings = {"sample_every": 2, "validate_every": 3, "checkpoint_every": 2}
    job = make_project(datasets=half, sample_prompts=PROMPTS, **settings).job()
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


def test_a_tracker_that_is_not_installed_is_an_error_before_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = TrainingSettings(trackers=("wandb",))
    specs: dict[str, Any] = {"wandb": None}
    monkeypatch.setattr(supported_settings, "find_spec", specs.get)
    with pytest.raises(TrainingError, match="wandb is not installed"):
        supported_settings.require_trackers(settings)
    specs["wandb"] = object()
    supported_settings.require_trackers(settings)
