from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.errors import TrainingError
from pipeline.recipe import TrainingSettings
from pipeline.trained_lora import objective
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.trained_lora.worker.loop import StopRequest, train

if TYPE_CHECKING:
    from conftest import Project


class StopsAt:
    """A report that asks for a stop after so many steps."""

    def __init__(self, steps: int) -> None:
        self.stop, self.steps = StopRequest(), steps

    def info(self, text: str) -> None: ...

    def progress(self, done: int, total: int, text: str) -> None:
        if done + 1 >= self.steps:
            self.stop.request()


def trained(order: TrainingJob, steps: int) -> bool:
    report = StopsAt(steps)
    return train(order, report, report.stop)


def shown(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    return events


def test_tensorboard_shows_each_step_once_with_pictures_and_validation_also_after_a_cut(
    make_project: Callable[..., Project],
) -> None:
    half = {"photos": {"validation_fraction": 0.5}}
    order = make_project(datasets=half, sample_every=2, validate_every=3, checkpoint_every=2).order()
    assert not trained(order, 3)
    assert trained(order, 99)
    layout = RunLayout(order.folder)
    events = shown(layout.metrics.parent)
    metrics = read_metrics(layout.metrics, 6)
    for name in ("loss", "learning_rate", "grad_norm"):
        points = {point.step: point.value for point in events.Scalars(name)}
        assert points == {line["step"] + 1: pytest.approx(line[name], rel=1e-6) for line in metrics}
    assert {"samples_per_second", "memory_bytes", "seconds"} <= set(events.Tags()["scalars"])
    assert sorted({point.step for point in events.Scalars("validation_loss")}) == [0, 3, 6]
    assert [point.step for point in events.Images("samples/00")] == [0, 2, 4, 6]


def test_without_trackers_nothing_but_our_own_logs_is_written(make_project: Callable[..., Project]) -> None:
    order = make_project(trackers=()).order()
    assert trained(order, 99)
    logs = RunLayout(order.folder).metrics.parent
    assert {path.suffix for path in logs.iterdir()} == {".jsonl"}


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = TrainingSettings(trackers=("wandb",))
    answers: dict[str, Any] = {"wandb": None}
    monkeypatch.setattr(objective, "find_spec", answers.get)
    with pytest.raises(TrainingError, match="wandb is not installed"):
        objective.require_trackers(settings)
    answers["wandb"] = object()
    objective.require_trackers(settings)
