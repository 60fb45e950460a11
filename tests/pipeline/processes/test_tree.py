"""Real process trees: children that ignore SIGTERM, grandchildren, orphans, sessions of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.processes.tree import ProcessTree

SLEEPER = "import time; time.sleep(600)"
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
time.sleep(600)
"""
PARENT_OF = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {code!r}], start_new_session={own})
print(child.pid, flush=True)
{then}
"""
WAIT = "time.sleep(600)"


class Started:
    """Starts processes and, whatever a test left alive, kills them in the end."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.others: list[psutil.Process] = []

    def run(self, code: str, *, own_session: bool = True) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=own_session
        )
        self.processes.append(process)
        return process

    def child_of(self, process: subprocess.Popen[str]) -> psutil.Process:
        assert process.stdout is not None
        self.others.append(psutil.Process(int(process.stdout.readline())))
        return self.others[-1]


@pytest.fixture
def started() -> Iterator[Started]:
    all_started = Started()
    yield all_started
    for process in all_started.processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    for other in all_started.others:
        if other.is_running():
            other.kill()


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(met: object, seconds: float = 20.0) -> None:
    assert callable(met)
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_members_are_the_root_and_all_below_it(started: Started) -> None:
    inner = PARENT_OF.format(code=SLEEPER, own=False, then=WAIT)
    root = started.run(PARENT_OF.format(code=inner, own=False, then=WAIT))
    child = started.child_of(root)
    until(lambda: len(child.children()) == 1)
    pids = [process.pid for process in ProcessTree(root.pid).members()]
    assert pids == [root.pid, child.pid, child.children()[0].pid]


def test_stop_ends_a_grandchild_in_a_session_of_its_own(started: Started) -> None:
    root = started.run(PARENT_OF.format(code=SLEEPER, own=True, then=WAIT))
    child = started.child_of(root)
    assert ProcessTree(root.pid).stop(grace_s=10) == []
    assert gone(child)
    assert root.wait(5) == -signal.SIGTERM


def test_stop_kills_what_ignores_sigterm_after_the_grace_period(started: Started) -> None:
    root = started.run(STUBBORN)
    assert root.stdout is not None
    assert root.stdout.readline() == "up\n"
    assert [process.pid for process in ProcessTree(root.pid).stop(grace_s=0.3)] == [root.pid]
    assert root.wait(5) == -signal.SIGKILL


def test_stop_waits_for_a_process_that_writes_a_checkpoint_first(started: Started, tmp_path: Path) -> None:
    done = tmp_path / "checkpoint"
    root = started.run(
        "import pathlib, signal, sys, time\n"
        "def stop(*_):\n"
        f"    time.sleep(0.5); pathlib.Path({str(done)!r}).touch(); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    assert root.stdout is not None
    root.stdout.readline()
    assert ProcessTree(root.pid).stop(grace_s=20) == []
    assert done.exists()
    assert root.wait(5) == 143


def test_R12_an_orphan_of_a_dead_root_is_found_by_the_roots_session(started: Started) -> None:
    root = started.run(PARENT_OF.format(code=SLEEPER, own=False, then=""))
    child = started.child_of(root)
    tree = ProcessTree(root.pid)
    root.wait(20)
    assert not gone(child)
    tree.stop(grace_s=10)
    assert gone(child)


def test_R12_an_orphan_that_left_the_session_is_found_when_it_was_seen_before(started: Started) -> None:
    root = started.run(PARENT_OF.format(code=SLEEPER, own=True, then=WAIT))
    child = started.child_of(root)
    tree = ProcessTree(root.pid)
    assert child in tree.members()
    root.kill()
    root.wait(20)
    tree.stop(grace_s=10)
    assert gone(child)


def test_stop_below_spares_the_root(started: Started) -> None:
    root = started.run(PARENT_OF.format(code=SLEEPER, own=False, then=WAIT))
    child = started.child_of(root)
    ProcessTree(root.pid).stop_below(grace_s=10)
    assert gone(child)
    assert root.poll() is None


def test_a_tree_that_is_gone_has_no_members_and_stops_at_once(started: Started) -> None:
    root = started.run("pass")
    root.wait(20)
    tree = ProcessTree(root.pid)
    assert tree.members() == []
    assert tree.stop(grace_s=10) == []
