"""Processes end with their parent, whenever it dies."""

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


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's request exists on Linux only")
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


def test_R12_a_process_whose_parent_died_before_it_could_ask_ends_at_once() -> None:
    someone_else = {**os.environ, "LATENTLINE_PARENT_PID": "1000000000"}
    done = subprocess.run([sys.executable, "-c", GUARDED], env=someone_else, capture_output=True, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stdout == b""


def test_a_module_started_by_hand_is_not_ended() -> None:
    by_hand = {name: value for name, value in os.environ.items() if name != "LATENTLINE_PARENT_PID"}
    done = subprocess.run([sys.executable, "-c", GUARDED], env=by_hand, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"guarded\n")


def test_R12_a_process_that_looks_after_its_parent_ends_once_that_is_another() -> None:
    script = """
import time
from pipeline.processes.guard import watch_parent
watch_parent(0.01, last=lambda: print("the last", flush=True))
time.sleep(60)
"""
    someone_else = {**os.environ, "LATENTLINE_PARENT_PID": "1000000000"}
    done = subprocess.run([sys.executable, "-c", script], env=someone_else, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, b"the last\n")


def test_a_process_that_ends_now_leaves_its_status_and_all_it_said_and_tidies_nothing_up() -> None:
    script = """
import atexit, sys
from pipeline.processes.guard import end_now
atexit.register(print, "tidied up")
print("said")
print("complained", file=sys.stderr)
end_now(7)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "said\n", "complained\n")
