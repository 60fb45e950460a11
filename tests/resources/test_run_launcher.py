"""Whether a run's process lives: real processes, and a real event log."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from dagster import DagsterInstance, DagsterRun, job, op
from dagster._core.events import EngineEventData
from dagster._core.launcher.base import WorkerStatus

from resources.run_launcher import WatchedRunLauncher
from tests.e2e.daemon import make_home


@op
def nothing() -> None:
    pass


@job
def empty() -> None:
    nothing()


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterInstance]:
    """One for all tests here: its three databases take a second to make."""
    home = make_home(tmp_path_factory.mktemp("dagster") / "home")
    with DagsterInstance.from_config(str(home)) as made:
        yield made


def status(instance: DagsterInstance, run: DagsterRun) -> WorkerStatus:
    return instance.run_launcher.check_run_worker_health(run).status


def named(instance: DagsterInstance, pid: int) -> DagsterRun:
    """A run whose engine has said that `pid` executes it."""
    run = instance.create_run_for_job(empty)
    instance.report_engine_event("Started process", run, EngineEventData.in_process(pid))
    instance.report_engine_event("something without a process", run)
    return run


def test_the_projects_settings_choose_it_and_watch_runs(instance: DagsterInstance) -> None:
    assert isinstance(instance.run_launcher, WatchedRunLauncher)
    assert instance.run_monitoring_enabled
    assert instance.run_monitoring_max_resume_run_attempts == 0


def test_a_run_that_has_named_no_process_yet_counts_as_alive(instance: DagsterInstance) -> None:
    assert status(instance, instance.create_run_for_job(empty)) == WorkerStatus.RUNNING


def test_O08_a_run_is_gone_when_its_process_was_killed(instance: DagsterInstance) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    run = named(instance, process.pid)
    assert status(instance, run) == WorkerStatus.RUNNING
    process.kill()
    time.sleep(0.2)
    assert status(instance, run) == WorkerStatus.NOT_FOUND, "a zombie executes nothing"
    process.wait()
    assert status(instance, run) == WorkerStatus.NOT_FOUND


def test_a_younger_process_with_the_same_number_is_another(
    instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 7 * 86_400)
    run = named(instance, os.getpid())
    monkeypatch.undo()
    assert status(instance, run) == WorkerStatus.NOT_FOUND


def test_a_real_job_names_its_process(instance: DagsterInstance) -> None:
    result = empty.execute_in_process(instance=instance)
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    assert status(instance, run) == WorkerStatus.RUNNING
