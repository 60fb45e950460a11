"""Requests to stop a training, by signal or by a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipeline.trained_lora.worker.stop_request import stop_on_signals
from tests.waiting import until


def test_a_signal_or_a_file_requests_a_stop(tmp_path: Path) -> None:
    file = tmp_path / "stop_request"
    with stop_on_signals(file) as stop:
        assert not stop.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.poll()

    with stop_on_signals(file) as stop:
        file.touch()
        assert stop.poll()
        file.unlink()
        assert stop.poll(), "a request is not withdrawn"


ORPHAN = """
import subprocess, sys, time
from functools import partial
from pathlib import Path
from pipeline.processes.guard import end_with_parent, watch_parent
from pipeline.trained_lora.worker.stop_request import stop_on_signals, stop_orphan

folder, saves = Path(sys.argv[1]), sys.argv[2] == "saves"
watch_parent(0.01, on_death=partial(stop_orphan, 60.0 if saves else 0.2))
if saves:
    end_with_parent()
else:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
with stop_on_signals() as stop:
    (folder / "started").touch()
    while not (saves and stop.requested):
        time.sleep(0.01)
    (folder / "checkpoint").touch()
"""
PARENT = f"""
import os, subprocess, sys
variables = {{**os.environ, "LATENTLINE_PARENT_PID": str(os.getpid())}}
subprocess.run([sys.executable, "-c", {ORPHAN!r}, *sys.argv[1:]], env=variables)
"""


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("answer", ["saves", "ignores"])
def test_R12_an_orphan_has_time_for_a_checkpoint_and_ends_with_its_descendants(
    tmp_path: Path, answer: str
) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), answer])
    until((tmp_path / "started").exists)
    descendants = psutil.Process(parent.pid).children(recursive=True)
    assert len(descendants) == (1 if answer == "saves" else 2)
    parent.kill()
    parent.wait()
    until(lambda: not any(map(is_alive, descendants)), seconds=20)
    assert (tmp_path / "checkpoint").exists() == (answer == "saves")
