"""A step that is stopped before Slurm has accepted its job, with a substitute for Slurm's commands."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from launchers.slurm import SlurmLauncher
from pipeline.processes.launch import TRAINING_MODULE
from pipeline.recipe import AccelerateSettings
from tests.e2e.daemon import until
from tests.launchers.steps import in_step

# The controller, a process in the background, registers the job a second after the first scancel. It does so
# even if sbatch was killed. The file `queue` is the registered job.
COMMANDS = {
    "sbatch": """
(while [ ! -e scancelled ]; do sleep 0.05; done; sleep 1; touch queue registered) > /dev/null 2>&1 &
touch submitted
while [ ! -e registered ]; do sleep 0.05; done
echo "Submitted batch job 7"
while [ -e queue ]; do sleep 0.05; done
exit 1
""",
    "scancel": "rm -f queue; touch scancelled",
    "squeue": "if [ -e queue ]; then echo 7; fi",
}


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the commands first on PATH, and provide the folder of their files."""
    state, programs = tmp_path / "controller", tmp_path / "bin"
    state.mkdir()
    programs.mkdir()
    for name, script in COMMANDS.items():
        (programs / name).write_text(f"#!/bin/sh\ncd '{state}'\n{script}", encoding="utf-8")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return state


def test_R12_a_stop_before_slurm_has_accepted_the_job_cancels_it(controller: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()

    def stop() -> None:
        until((controller / "submitted").exists, "sbatch", seconds=20, log=log)
        os.kill(os.getpid(), signal.SIGINT)

    def work(launch: Any) -> None:
        threading.Thread(target=stop, daemon=True).start()
        launch(TRAINING_MODULE, tmp_path / "runs" / "0123" / "order.json")

    launcher = SlurmLauncher(machines=2, scratch=str(tmp_path / "scratch"))
    messages, error = in_step(launcher, work, AccelerateSettings(num_processes=2))
    assert type(error).__name__ == "DagsterExecutionInterruptedError"
    assert any(message.startswith("cancelled the Slurm job") for message in messages)
    until((controller / "registered").exists, "the controller", seconds=20, log=log)
    assert not (controller / "queue").exists(), "the job has not been cancelled"
