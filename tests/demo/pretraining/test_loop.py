"""The training loop resumes exactly, and its learning rate does not depend on later steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from demo.pretraining.loop import Part, Stage, train


class _StoppedError(Exception):
    pass


def _train(folder: Path, *, stop_at: int | None = None) -> Tensor:
    torch.manual_seed(0)
    network = nn.Linear(4, 1)
    part = Part(seed=7)

    def loss_at(step: int) -> Tensor:
        if step == stop_at:
            raise _StoppedError
        samples = torch.randn(8, 4, generator=part.generator(step))
        return (network(samples) - samples.sum(dim=1, keepdim=True)).square().mean()

    folder.mkdir(exist_ok=True)
    train(Stage("linear", folder, 300, 0.05, checkpoint_every_s=0.0), {"linear": network}, loss_at)
    return network.weight.detach()


def test_a_stopped_run_ends_with_the_weights_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    complete = _train(tmp_path / "complete")
    with pytest.raises(_StoppedError):
        _train(tmp_path / "stopped", stop_at=170)
    assert torch.equal(_train(tmp_path / "stopped"), complete)

    logs = [(tmp_path / name / "linear.jsonl").read_text() for name in ("complete", "stopped")]
    assert logs[0] == logs[1]
    losses = [json.loads(line)["loss"] for line in logs[0].splitlines()]
    assert losses[-1] < losses[0] / 10


def test_the_learning_rate_rises_stays_and_falls_to_zero(tmp_path: Path) -> None:
    stage = Stage("stage", tmp_path, 1000, 1.0)
    assert stage.rate_at(0) == pytest.approx(0.01)
    assert stage.rate_at(100) == stage.rate_at(700) == 1.0
    assert stage.rate_at(850) == pytest.approx(0.5)
    assert 0 < stage.rate_at(999) < 0.01


def test_more_steps_do_not_change_the_rate_before_the_cooldown(tmp_path: Path) -> None:
    short, long = (Stage("stage", tmp_path, steps, 1.0) for steps in (1000, 5000))
    assert [short.rate_at(step) for step in range(700)] == [long.rate_at(step) for step in range(700)]
