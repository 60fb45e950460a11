from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import TrainingError
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.trained_lora.worker import before_training, engine, loop
from pipeline.trained_lora.worker.optimizers import UpdateOnDevice
from tests.pipeline.trained_lora.runs import bits, outcome, poisoned, run_until

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


@pytest.fixture
def checking_on_device(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let the device check updates as a GPU does; return the settings of an optimizer that can skip them."""

    def on_any_device(optimizer: torch.optim.Optimizer, weights: Any) -> UpdateOnDevice:
        return UpdateOnDevice(optimizer, weights)

    monkeypatch.setattr(engine, "update_on_device", on_any_device)
    return {"optimizer": "torch.optim.AdamW", "optimizer_arguments": {"fused": True}}


def test_a_gpu_s_numbers_are_read_one_step_later_and_before_a_step_is_saved(
    make_project: Callable[..., Project], checking_on_device: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"steps": 5, "checkpoint_every": 3, "validate_every": 0, **checking_on_device}
    project = make_project(**settings)
    events: list[str] = []

    def recorded(kind: type, method: str, word: str) -> None:
        original = getattr(kind, method)

        def record(self: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
            events.append(f"{word} {getattr(batch, 'step', batch)}")
            return original(self, batch, *arguments, **options)

        monkeypatch.setattr(kind, method, record)

    late = project.changed("late").job()
    with monkeypatch.context() as patch:
        patch.setattr(before_training, "run_trial_step", lambda *arguments: None)
        recorded(loop.Engine, "start", "start")
        recorded(loop.MetricsLog, "step", "log")
        recorded(loop.Engine, "state", "save")
        assert run_until(late)[0]
    steps = [each for each in events if each != "save 0"]
    first = "start 0, start 1, log 0, start 2, log 1, log 2, save 3, start 3, start 4, log 3, log 4, save 5"
    assert ", ".join(steps) == first

    monkeypatch.setattr(engine, "update_on_device", lambda *arguments: None)
    at_once = project.changed("at_once").job()
    assert run_until(at_once)[0]
    assert outcome(late) == outcome(at_once)


def test_R05_a_nan_loss_that_is_read_one_step_later_keeps_the_last_good_lora(
    make_project: Callable[..., Project], checking_on_device: dict[str, Any]
) -> None:
    project = make_project(steps=6, **checking_on_device)
    good = project.changed("good", steps=2).job()
    assert run_until(good)[0]
    job, culprit = poisoned(project.changed("poisoned").job())
    with pytest.raises(TrainingError, match=r"loss of step 2 .*the LoRA after 2 steps is in") as excinfo:
        run_until(job)
    assert culprit in excinfo.value.where
    layout = RunLayout(job.folder)
    for path in sorted(RunLayout(good.folder).exported.iterdir()):
        assert bits(load_file(layout.last_good / path.name)) == bits(load_file(path))
    assert [line["step"] for line in read_metrics(layout.metrics, 6)] == [0, 1]
