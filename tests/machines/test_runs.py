"""Runs on one machine while Dagster's daemon runs on another."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dagster import DagsterEventType, DagsterRun, DagsterRunStatus

from resources.run_worker import MACHINE_TAG
from tests.machines.children import Child, until
from tests.machines.project import Project, latentline

if TYPE_CHECKING:
    from tests.machines.pair import Pair

END_EVENTS = (DagsterEventType.RUN_FAILURE, DagsterEventType.RUN_SUCCESS)

DAEMON = [sys.executable, "-m", "dagster._daemon", "run", "-m", "assets.definitions"]


@contextmanager
def daemon_on(project: Project) -> Generator[Child]:
    """Run Dagster's daemon on the project's machine during the body."""
    daemon = project.machine.start(DAEMON, log="daemon.log", **project.variables())
    until(lambda: "Instance is configured" in daemon.output(), "the daemon", seconds=60, child=daemon)
    yield daemon
    assert not daemon.has_ended, daemon.output()[-3000:]


def first_run(pair: Pair) -> DagsterRun | None:
    return next(iter(pair.instance.get_runs(ascending=True)), None)


def is_tagged(run: DagsterRun | None) -> bool:
    return run is not None and MACHINE_TAG in run.tags


def test_O11_a_daemon_on_another_machine_leaves_a_run_alone_and_its_own_machine_ends_a_killed_one(
    pair: Pair,
) -> None:
    command = latentline("run", "small", "--cache-only")
    with daemon_on(pair.a):
        # A run is killed on b. The daemon on a checks it every second and cannot judge.
        killed = pair.b.machine.start(command, log="run.log", **pair.b.variables())
        until(lambda: is_tagged(first_run(pair)), "the run", seconds=90, child=killed)
        for pid in pair.b.machine.pids("assets.run"):
            pair.b.machine.kill(pid)
        killed.wait(30)
        time.sleep(4)
        dead = first_run(pair)
        assert dead is not None
        assert (dead.status, dead.tags[MACHINE_TAG]) == (DagsterRunStatus.STARTED, "b")

        # The next start on b ends it, and the new run succeeds while the daemon on a checks it.
        completed = pair.b.latentline("run", "small", "--cache-only")
        assert completed.returncode == 0, completed.stderr[-3000:]

    first, second = pair.instance.get_runs(ascending=True)
    assert (first.status, second.status) == (DagsterRunStatus.FAILURE, DagsterRunStatus.SUCCESS)
    ends = [
        event
        for run in (first, second)
        for event in pair.instance.all_logs(run.run_id, of_type={*END_EVENTS})
    ]
    assert [event.get_dagster_event().event_type for event in ends] == [*END_EVENTS]
    assert "ended without reporting it" in (ends[0].get_dagster_event().message or "")


def test_the_machines_have_different_names_processes_and_disks_at_the_same_path(pair: Pair) -> None:
    """An example of the rig."""
    a, b = pair.a.machine, pair.b.machine
    assert (a.run(["hostname"]).stdout, b.run(["hostname"]).stdout) == ("a\n", "b\n")

    script = 'echo "$WORD" > word; cat word'
    assert a.run(["sh", "-c", script], WORD="one").stdout == "one\n"
    assert b.run(["cat", str(a.disk / "word")]).returncode != 0, "b has no such file at that path"
    assert a.path("word").read_text() == "one\n", "the test sees the disks of both"

    sleeping = a.start(["sleep", "60"], log="sleep.log")
    until(lambda: a.pids("sleep 60"), "the process", seconds=5)
    assert b.pids("sleep 60") == []
    a.kill(a.pids("sleep 60")[0])
    assert sleeping.wait(5) != 0
