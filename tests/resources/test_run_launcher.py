"""The health check of a run's process, with real processes and a real event log."""

from __future__ import annotations

import os
import platform
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from dagster import DagsterEvent, DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter, job, op
from dagster._core.events import EngineEventData

from resources.run_launcher import WatchedRunLauncher, end_dead_runs
from resources.run_worker import MACHINE_TAG
from tests.e2e.daemon import make_home


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


def status(instance: DagsterInstance, run: DagsterRun) -> str:
    return instance.run_launcher.check_run_worker_health(run).status.name


def run_of_process(instance: DagsterInstance, pid: int, machine: str | None = platform.node()) -> DagsterRun:
    """Create a run with an engine event that names `pid` as its process, and a tag that names its machine."""
    tags = {} if machine is None else {MACHINE_TAG: machine}
    run = instance.create_run_for_job(empty, tags=tags)
    instance.report_engine_event("Started process", run, EngineEventData.in_process(pid))
    instance.report_engine_event("an event without a process", run)
    return run


def start_event() -> DagsterEvent:
    return DagsterEvent(event_type_value="PIPELINE_START", job_name="empty")


def test_the_projects_settings_select_the_launcher_and_run_monitoring(instance: DagsterInstance) -> None:
    assert isinstance(instance.run_launcher, WatchedRunLauncher)
    assert instance.run_launcher.supports_check_run_worker_health is True
    assert instance.run_monitoring_enabled
    assert instance.run_monitoring_max_resume_run_attempts == 0


def test_a_run_without_a_process_event_counts_as_running(instance: DagsterInstance) -> None:
    assert status(instance, instance.create_run_for_job(empty)) == "RUNNING"


def test_O08_a_run_is_not_found_when_its_process_was_killed(instance: DagsterInstance) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    run = run_of_process(instance, process.pid)
    assert status(instance, run) == "RUNNING"
    process.kill()
    time.sleep(0.2)
    assert status(instance, run) == "NOT_FOUND", "a zombie does not execute the run"
    process.wait()
    assert status(instance, run) == "NOT_FOUND"


def dead_process() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_run_of_another_machine_counts_as_running(instance: DagsterInstance) -> None:
    assert status(instance, run_of_process(instance, dead_process(), "another-machine")) == "RUNNING"


def test_a_run_that_does_not_name_its_machine_has_a_minute_to_do_so(
    instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_s = time.time()
    monkeypatch.setattr(time, "time", lambda: start_s)
    run = run_of_process(instance, dead_process(), machine=None)
    found: list[str] = []
    for passed_s in (0, 59.5, 60.5):
        monkeypatch.setattr(time, "time", lambda now=start_s + passed_s: now)
        found.append(status(instance, run))
    assert found == ["RUNNING", "RUNNING", "NOT_FOUND"]


def test_O08_a_run_of_a_dead_process_is_ended_and_its_slot_in_the_pool_is_free(
    instance: DagsterInstance,
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    dead = run_of_process(instance, process.pid)
    alive = run_of_process(instance, os.getpid())
    finished = run_of_process(instance, process.pid)
    process.kill()
    process.wait()
    success = DagsterEvent(event_type_value="PIPELINE_SUCCESS", job_name="empty")
    instance.report_dagster_event(success, finished.run_id)
    storage = instance.event_log_storage
    storage.set_concurrency_slots("gpu", 1)
    for run in (dead, alive):
        instance.report_dagster_event(start_event(), run.run_id)
        storage.claim_concurrency_slot("gpu", run.run_id, "train")

    end_dead_runs(instance)

    assert {run.status for run in instance.get_runs(RunsFilter(run_ids=[dead.run_id]))} == {
        DagsterRunStatus.FAILURE
    }
    assert {run.status for run in instance.get_runs(RunsFilter(run_ids=[alive.run_id]))} == {
        DagsterRunStatus.STARTED
    }
    (ended,) = instance.get_runs(RunsFilter(run_ids=[finished.run_id]))
    assert ended.status == DagsterRunStatus.SUCCESS
    assert storage.claim_concurrency_slot("gpu", alive.run_id, "train").is_claimed


def test_a_younger_process_that_reuses_the_id_does_not_count(
    instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 7 * 86_400)
    run = run_of_process(instance, os.getpid())
    monkeypatch.undo()
    assert status(instance, run) == "NOT_FOUND"


@pytest.mark.parametrize(("earlier_s", "found"), [(1.5, "RUNNING"), (2.5, "NOT_FOUND")])
def test_a_process_may_seem_to_start_two_seconds_after_its_first_event(
    instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch, earlier_s: float, found: str
) -> None:
    """The system counts a process's start in ticks."""
    event_s = psutil.Process().create_time() - earlier_s
    monkeypatch.setattr(time, "time", lambda: event_s)
    run = run_of_process(instance, os.getpid())
    monkeypatch.undo()
    assert status(instance, run) == found


def test_a_real_job_has_an_event_that_names_its_process(instance: DagsterInstance) -> None:
    result = empty.execute_in_process(instance=instance)
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    assert status(instance, run) == "RUNNING"


def test_O08_the_command_of_a_new_container_ends_the_runs_of_the_old_one(
    instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of_process(instance, dead_process())
    instance.report_dagster_event(start_event(), run.run_id)
    monkeypatch.setenv("DAGSTER_HOME", instance.root_directory)
    runpy.run_module("resources.dead_runs", run_name="__main__")
    assert instance.get_run_by_id(run.run_id).status == DagsterRunStatus.FAILURE
