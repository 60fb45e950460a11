"""Runs of dead processes, with real processes and a real event log."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from dagster import (
    DagsterEvent,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    build_sensor_context,
    job,
    op,
)
from dagster._core.events import EngineEventData

from assets.automation import dead_runs_sensor
from assets.location import Location
from resources import dead_runs
from resources.dead_runs import end_dead_runs
from resources.run_worker import MACHINE_RUN_TAG, MACHINE_TAG, PID_NAMESPACE_TAG
from tests.e2e.daemon import ROOT, make_home
from tests.pipeline.namespaces import namespace


@op
def nothing() -> None:
    pass


@job
def empty() -> None:
    nothing()


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterInstance]:
    """An instance for the module, because creating its three databases takes a second."""
    home = make_home(tmp_path_factory.mktemp("dagster") / "home")
    with DagsterInstance.from_config(str(home)) as instance:
        yield instance


def started_run(instance: DagsterInstance, pid: int, machine: str | None = platform.node()) -> DagsterRun:
    """Return a started run with the process `pid`, and a tag that names its machine."""
    run = instance.create_run_for_job(empty)
    if machine is not None:
        instance.add_run_tags(run.run_id, {MACHINE_TAG: machine, MACHINE_RUN_TAG: run.run_id})
    instance.report_dagster_event(start_event(), run.run_id)
    instance.report_engine_event("Started process", run, EngineEventData.in_process(pid))
    instance.report_engine_event("an event without a process", run)
    return run


def is_ended(instance: DagsterInstance, run: DagsterRun) -> bool:
    """End the dead runs, and return whether `run` was one of them."""
    return run.run_id in end_dead_runs(instance)


def status(instance: DagsterInstance, run: DagsterRun) -> DagsterRunStatus:
    """Return the stored status."""
    stored = instance.get_run_by_id(run.run_id)
    assert stored is not None
    return stored.status


def start_event() -> DagsterEvent:
    return DagsterEvent(event_type_value="PIPELINE_START", job_name="empty")


def test_a_run_without_a_process_event_lives(instance: DagsterInstance) -> None:
    run = instance.create_run_for_job(empty, tags={MACHINE_TAG: platform.node()})
    instance.report_dagster_event(start_event(), run.run_id)
    assert not is_ended(instance, run)


def test_O08_a_run_is_ended_when_its_process_was_killed(instance: DagsterInstance) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    run = started_run(instance, process.pid)
    assert not is_ended(instance, run)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_ended(instance, run), "a zombie does not execute the run"
    process.wait()
    assert is_ended(instance, started_run(instance, process.pid))


def dead_process() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("machine", ["another-machine", None])
def test_a_run_that_does_not_name_this_machine_lives(instance: DagsterInstance, machine: str | None) -> None:
    assert not is_ended(instance, started_run(instance, dead_process(), machine))


def test_a_re_execution_lives_although_its_parent_s_machine_is_this_one(instance: DagsterInstance) -> None:
    parent = started_run(instance, dead_process())
    stored = instance.get_run_by_id(parent.run_id)
    assert stored is not None
    run = instance.create_run_for_job(empty, tags=stored.tags)
    instance.report_dagster_event(start_event(), run.run_id)
    instance.report_engine_event("Started process", run, EngineEventData.in_process(dead_process()))
    assert not is_ended(instance, run)
    assert status(instance, parent) == DagsterRunStatus.FAILURE


def test_O08_a_run_of_a_dead_process_is_ended_and_its_slot_in_the_pool_is_free(
    instance: DagsterInstance,
) -> None:
    pid = dead_process()
    dead, alive, finished = (started_run(instance, each) for each in (pid, os.getpid(), pid))
    success = DagsterEvent(event_type_value="PIPELINE_SUCCESS", job_name="empty")
    instance.report_dagster_event(success, finished.run_id)
    storage = instance.event_log_storage
    storage.set_concurrency_slots("gpu", 1)
    for run in (dead, alive):
        storage.claim_concurrency_slot("gpu", run.run_id, "train")

    assert end_dead_runs(instance) == [dead.run_id]

    statuses = [status(instance, run) for run in (dead, alive, finished)]
    assert statuses == [DagsterRunStatus.FAILURE, DagsterRunStatus.STARTED, DagsterRunStatus.SUCCESS]
    assert storage.claim_concurrency_slot("gpu", alive.run_id, "train").is_claimed


def test_a_younger_process_that_reuses_the_id_does_not_count(
    instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 7 * 86_400)
    run = started_run(instance, os.getpid())
    monkeypatch.undo()
    assert is_ended(instance, run)


@pytest.mark.parametrize(("earlier_s", "ended"), [(1.5, False), (2.5, True)])
def test_a_process_may_seem_to_start_two_seconds_after_its_first_event(
    instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch, earlier_s: float, ended: bool
) -> None:
    """The system counts a process's start in ticks."""
    event_s = psutil.Process().create_time() - earlier_s
    monkeypatch.setattr(time, "time", lambda: event_s)
    run = started_run(instance, os.getpid())
    monkeypatch.undo()
    assert is_ended(instance, run) is ended


RUN = """
import os, sys
from dagster import DagsterInstance
from dagster._core.events import EngineEventData
from resources.run_worker import lock_run, record_machine

with DagsterInstance.from_config(sys.argv[1]) as instance:
    run = instance.get_run_by_id(sys.argv[2])
    lock_run(instance, run.run_id)
    record_machine(instance, run.run_id)
    instance.report_engine_event("Started process", run, EngineEventData.in_process(os.getpid()))
    print("started", flush=True)
    sys.stdin.read()
"""
"""The process of a run, until its input ends."""

JUDGE = """
import sys
from dagster import DagsterInstance
from resources.dead_runs import end_dead_runs

with DagsterInstance.from_config(sys.argv[1]) as instance:
    print(*end_dead_runs(instance))
"""


def test_O11_a_container_with_the_same_host_name_ends_a_run_only_if_its_process_has_died(
    instance: DagsterInstance,
) -> None:
    container = namespace("--pid", "--fork", "--mount-proc", "--kill-child")
    home, run = instance.root_directory, instance.create_run_for_job(empty)
    instance.report_dagster_event(start_event(), run.run_id)

    def judged(*start: str) -> str:
        judge = [*start, sys.executable, "-c", JUDGE, home]
        return subprocess.run(judge, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    command = [sys.executable, "-c", RUN, home, run.run_id]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        assert run.run_id not in judged(*container)
        process.kill()
        process.wait()
        assert judged(*container) == run.run_id, "a new container ends the runs of the one that it replaces"
    assert status(instance, run) == DagsterRunStatus.FAILURE


def test_O11_a_run_without_a_lock_is_judged_only_where_its_process_id_means_something(
    instance: DagsterInstance,
) -> None:
    run = started_run(instance, dead_process())
    instance.add_run_tags(run.run_id, {PID_NAMESPACE_TAG: "another boot pid:[1]"})
    assert not is_ended(instance, run)


def test_the_runs_of_another_kind_of_run_launcher_live() -> None:
    """Their processes may be in containers."""
    with DagsterInstance.ephemeral() as ephemeral:
        assert not is_ended(ephemeral, started_run(ephemeral, dead_process()))


def test_a_run_that_succeeds_while_its_process_is_looked_up_stays_successful(
    instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started_run(instance, dead_process())
    look_up = dead_runs._dead_process

    def end_first(instance: DagsterInstance, listed: DagsterRun) -> int | None:
        if listed.run_id == run.run_id:
            success = DagsterEvent(event_type_value="PIPELINE_SUCCESS", job_name=empty.name)
            instance.report_dagster_event(success, run.run_id)
        return look_up(instance, listed)

    monkeypatch.setattr(dead_runs, "_dead_process", end_first)
    assert run.run_id not in end_dead_runs(instance)
    stored = instance.get_run_by_id(run.run_id)
    assert stored is not None
    assert stored.status == DagsterRunStatus.SUCCESS


def test_a_run_whose_process_died_while_it_was_canceled_is_canceled(instance: DagsterInstance) -> None:
    run = started_run(instance, dead_process())
    instance.report_run_canceling(run)
    assert end_dead_runs(instance) == [run.run_id]
    stored = instance.get_run_by_id(run.run_id)
    assert stored is not None
    assert stored.status == DagsterRunStatus.CANCELED


def test_the_sensor_reports_the_runs_that_it_ended(instance: DagsterInstance) -> None:
    run = started_run(instance, dead_process())
    sensor = dead_runs_sensor(Location("gpu"))
    reasons = [str(sensor(build_sensor_context(instance)).skip_message) for _ in range(2)]
    assert reasons == [f"ended {run.run_id}", "no dead runs"]
