"""A training on two machines: `latentline train` twice, with a copy of the run's folder for each."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.trained_lora.job import INPUTS_FILE, JOB_FILE, TrainingJob
from pipeline.trained_lora.run_folder import RunLayout, read_metrics

_LATENTLINE = "from pipeline.cli.main import main; main()"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def copied_order(job: TrainingJob, disk: Path) -> Path:
    """Copy what machines other than 0 need of a run to another disk, and return the path of the order."""
    folder = disk / "runs" / job.run
    folder.mkdir(parents=True, exist_ok=True)
    for name in (JOB_FILE, INPUTS_FILE):
        shutil.copy(job.folder / name, folder / name)
    return folder / JOB_FILE


@dataclass
class Machine:
    """`latentline train` on one of two machines; its output is in a file.

    Attributes:
        order: Path of its order.
        prefix: Command that starts others on this machine.
    """

    rank: int
    order: Path
    master: str
    output: Path
    prefix: Sequence[str] = ()
    wait_s: int = 60

    def start(self) -> Machine:
        arguments = ["--machines", "2", "--rank", str(self.rank), "--master", self.master]
        command = [sys.executable, "-c", _LATENTLINE, "train", str(self.order), *arguments]
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [*self.prefix, *command, "--wait", str(self.wait_s)],
                env={**os.environ, "NO_COLOR": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return self

    def end(self, timeout_s: float = 120) -> int:
        """Wait for the end, and return the exit status."""
        return self.process.wait(timeout_s)

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """Kill all processes at once, as if the machine lost its power."""
        if self.process.poll() is not None:
            return
        root = psutil.Process(self.process.pid)
        processes = [root, *root.children(recursive=True)]
        for process in processes:
            process.send_signal(signal.SIGSTOP)  # none of them may react to the death of another
        for process in processes:
            process.send_signal(signal.SIGKILL)
        self.process.wait(60)


def wait_for_steps(job: TrainingJob, number: int, *machines: Machine) -> None:
    """Wait until the run has done a number of steps; fail if a machine ends before."""
    end_s = time.monotonic() + 400
    while len(read_metrics(RunLayout(job.folder).metrics, 10**6)) < number:
        for machine in machines:
            assert machine.process.poll() is None, machine.text()
        assert time.monotonic() < end_s, "the run makes no steps"
        time.sleep(0.02)
