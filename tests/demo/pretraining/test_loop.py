"""The training loop resumes exactly, and its learning rate does not depend on later steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from demo.pretraining.loop import Part, Stage
from tests.demo.pretraining.linear_stage import StoppedError, train_linear


def _train(folder: Path, *, stop_at: int | None = None) -> Tensor:
    return train_linear(folder, Part(seed=7), stop_at=stop_at)


def test_a_stopped_run_ends_with_the_weights_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    complete = _train(tmp_path / "complete")
    with pytest.raises(StoppedError):
        _train(tmp_path / "stopped", stop_at=170)
    assert torch.equal(_train(tmp_path / "stopped"), complete)

    logs = [(tmp_path / name / "linear.jsonl").read_text() for name in ("complete", "stopped")]
    assert logs[0] == logs[1]
    losses = [json.loads(line)["loss"] for line in logs[0].splitlines()]
    assert losses[-1] < losses[0] / 10


@pytest.mark.slow
def test_two_processes_train_the_weights_of_one(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launch, "-m", "tests.demo.pretraining.linear_stage", str(tmp_path / "two")], check=True)
    together = torch.load(tmp_path / "two" / "linear.pt", weights_only=True)["networks"]["linear"]["weight"]
    torch.testing.assert_close(together, _train(tmp_path / "one"), rtol=1e-4, atol=1e-5)


def test_the_learning_rate_rises_stays_and_falls_to_zero(tmp_path: Path) -> None:
    stage = Stage("stage", tmp_path, 1000, 1.0)
    assert stage.rate_at(0) == pytest.approx(0.01)
    assert stage.rate_at(100) == stage.rate_at(700) == 1.0
    assert stage.rate_at(850) == pytest.approx(0.5)
    assert 0 < stage.rate_at(999) < 0.01


def test_more_steps_do_not_change_the_rate_before_the_cooldown(tmp_path: Path) -> None:
    short, long = (Stage("stage", tmp_path, steps, 1.0) for steps in (1000, 5000))
    assert [short.rate_at(step) for step in range(700)] == [long.rate_at(step) for step in range(700)]
