"""Launched processes end with their parent, whenever it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

GUARDED = (
    "from pipeline.processes.guard import end_with_parent; end_with_parent(); print('guarded', flush=True)"
)
PARENT = f"""
import os, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", {GUARDED + "; import time; time.sleep(300)"!r}],
    env={{**os.environ, "LATENTLINE_PARENT_PID": str(os.getpid())}}, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this request to the kernel")
def test_R12_a_guarded_process_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 20
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_R12_a_process_whose_parent_died_before_the_request_ends_at_once() -> None:
    other_parent = {**os.environ, "LATENTLINE_PARENT_PID": "1000000000"}
    completed = subprocess.run(
        [sys.executable, "-c", GUARDED], env=other_parent, capture_output=True, check=False
    )
    assert completed.returncode == 128 + signal.SIGTERM
    assert completed.stdout == b""


def test_a_module_started_by_hand_keeps_running() -> None:
    without_parent = {name: value for name, value in os.environ.items() if name != "LATENTLINE_PARENT_PID"}
    completed = subprocess.run(
        [sys.executable, "-c", GUARDED], env=without_parent, capture_output=True, check=False
    )
    assert (completed.returncode, completed.stdout) == (0, b"guarded\n")


def test_R12_a_process_that_polls_for_its_parent_ends_when_it_is_gone() -> None:
    script = """
import time
from pipeline.processes.guard import watch_parent
watch_parent(0.01, on_death=lambda: print("stopping", flush=True))
time.sleep(60)
"""
    other_parent = {**os.environ, "LATENTLINE_PARENT_PID": "1000000000"}
    completed = subprocess.run(
        [sys.executable, "-c", script], env=other_parent, capture_output=True, check=False
    )
    assert (completed.returncode, completed.stdout) == (128 + signal.SIGTERM, b"stopping\n")


def test_end_now_keeps_status_and_output_and_skips_exit_handlers() -> None:
    script = """
import atexit, sys
from pipeline.processes.guard import end_now
atexit.register(print, "exit handler")
print("output")
print("error", file=sys.stderr)
end_now(7)
"""
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stdout, completed.stderr) == (7, "output\n", "error\n")
