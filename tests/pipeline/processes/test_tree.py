"""Real process trees: children that ignore SIGTERM, grandchildren, orphans and separate sessions."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.processes.tree import ProcessTree
from tests.waiting import until

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


class Processes:
    """Starts processes, and kills the remaining ones after the test."""

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
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    for process in processes.processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    for other in processes.others:
        if other.is_running():
            other.kill()


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_members_are_the_root_and_its_descendants(processes: Processes) -> None:
    inner = PARENT_OF.format(code=SLEEPER, own=False, then=WAIT)
    root = processes.run(PARENT_OF.format(code=inner, own=False, then=WAIT))
    child = processes.child_of(root)
    until(lambda: len(child.children()) == 1)
    pids = [process.pid for process in ProcessTree(root.pid).members()]
    assert pids == [root.pid, child.pid, child.children()[0].pid]


def test_stop_ends_a_child_in_a_separate_session(processes: Processes) -> None:
    root = processes.run(PARENT_OF.format(code=SLEEPER, own=True, then=WAIT))
    child = processes.child_of(root)
    assert ProcessTree(root.pid).stop(grace_s=10) == []
    assert has_ended(child)
    assert root.wait(5) == -signal.SIGTERM


def test_stop_kills_a_process_that_ignores_sigterm_after_the_grace_period(processes: Processes) -> None:
    root = processes.run(STUBBORN)
    assert root.stdout is not None
    assert root.stdout.readline() == "up\n"
    assert [process.pid for process in ProcessTree(root.pid).stop(grace_s=0.3)] == [root.pid]
    assert root.wait(5) == -signal.SIGKILL


def test_stop_waits_for_a_process_that_writes_a_checkpoint(processes: Processes, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    root = processes.run(
        "import pathlib, signal, sys, time\n"
        "def stop(*_):\n"
        f"    time.sleep(0.5); pathlib.Path({str(checkpoint)!r}).touch(); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    assert root.stdout is not None
    root.stdout.readline()
    assert ProcessTree(root.pid).stop(grace_s=20) == []
    assert checkpoint.exists()
    assert root.wait(5) == 143


def test_R12_an_orphan_of_a_dead_root_is_found_by_the_roots_session(processes: Processes) -> None:
    root = processes.run(PARENT_OF.format(code=SLEEPER, own=False, then=""))
    child = processes.child_of(root)
    tree = ProcessTree(root.pid)
    root.wait(20)
    assert not has_ended(child)
    tree.stop(grace_s=10)
    assert has_ended(child)


def test_R12_an_orphan_in_another_session_is_found_if_it_was_a_member_before(processes: Processes) -> None:
    root = processes.run(PARENT_OF.format(code=SLEEPER, own=True, then=WAIT))
    child = processes.child_of(root)
    tree = ProcessTree(root.pid)
    assert child in tree.members()
    root.kill()
    root.wait(20)
    tree.stop(grace_s=10)
    assert has_ended(child)


def test_stop_below_spares_the_root(processes: Processes) -> None:
    root = processes.run(PARENT_OF.format(code=SLEEPER, own=False, then=WAIT))
    child = processes.child_of(root)
    ProcessTree(root.pid).stop_below(grace_s=10)
    assert has_ended(child)
    assert root.poll() is None


def test_a_tree_whose_processes_ended_has_no_members_and_stops_at_once(processes: Processes) -> None:
    root = processes.run("pass")
    root.wait(20)
    tree = ProcessTree(root.pid)
    assert tree.members() == []
    assert tree.stop(grace_s=10) == []
