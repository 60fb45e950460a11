"""A process that has imported before its job exists takes the job over, and never outlives its run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipeline.processes.launch import launch_command, launch_environment
from pipeline.processes.waiting import processes_ahead, start_process
from pipeline.recipe import AccelerateSettings
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = AccelerateSettings(num_processes=1)
MODULE = "entry_that_waits"

ENTRY = """
import json, os, sys
from pathlib import Path
from pipeline.processes.launch import ERROR_FILE_VARIABLE, PARENT_VARIABLE
from pipeline.processes.waiting import WAIT, job_file

def imports():
    folder = Path(__file__).parent
    (folder / "imported").write_text(str(os.getpid()))
    if (folder / "fails").exists():
        raise ImportError("no such library")
    if (folder / "dies").exists():
        os._exit(1)

waited = sys.argv[1] == WAIT
job = job_file(imports)
print("printed", flush=True)
print("an error", file=sys.stderr, flush=True)
names = (ERROR_FILE_VARIABLE, PARENT_VARIABLE, "OF_THE_JOB")
result = {name: os.environ.get(name) for name in names} | {"waited": waited, "pid": os.getpid()}
job.write_text(json.dumps(result))
sys.exit(7)
"""


@pytest.fixture(autouse=True)
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{MODULE}.py").write_text(ENTRY, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")


def waiting_pid(folder: Path) -> int:
    file = folder / "imported"
    until(lambda: file.exists() and file.read_text())
    return int(file.read_text())


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def result_of(folder: Path, **variables: str) -> dict[str, object]:
    """Start the entry module as a launcher does, and return what it found."""
    path, output = folder / "job.json", folder / "output.txt"
    environment = launch_environment(SETTINGS, folder / "error.json") | variables
    with output.open("wb") as file:
        process = start_process(launch_command(SETTINGS, MODULE, path), environment, file)
    assert process.wait(60) == 7
    assert output.read_text().splitlines() == ["printed", "an error"]
    result = json.loads(path.read_text())
    assert result["pid"] == process.pid
    return result


def test_the_process_that_waits_gets_the_job_with_its_variables_and_output(tmp_path: Path) -> None:
    with processes_ahead([MODULE], SETTINGS):
        waiting = waiting_pid(tmp_path)
        result = result_of(tmp_path, OF_THE_JOB="a value")
        assert result == {
            "LATENTLINE_ERROR_FILE": str(tmp_path / "error.json"),
            "LATENTLINE_PARENT_PID": str(os.getpid()),
            "OF_THE_JOB": "a value",
            "waited": True,
            "pid": waiting,
        }
        assert not result_of(tmp_path)["waited"], "a second job has a process of its own"


def test_a_job_with_other_settings_has_a_process_of_its_own(tmp_path: Path) -> None:
    with processes_ahead([MODULE], SETTINGS):
        waiting = waiting_pid(tmp_path)
        assert not result_of(tmp_path, OMP_NUM_THREADS="7")["waited"]
        assert is_running(waiting)
    assert not is_running(waiting)


def test_a_process_whose_imports_failed_gets_the_job_that_reports_why(tmp_path: Path) -> None:
    (tmp_path / "fails").touch()
    with processes_ahead([MODULE], SETTINGS):
        assert result_of(tmp_path)["pid"] == waiting_pid(tmp_path)


def test_a_job_has_a_process_of_its_own_if_the_one_that_waits_has_died(tmp_path: Path) -> None:
    (tmp_path / "dies").touch()
    with processes_ahead([MODULE], SETTINGS):
        waiting = waiting_pid(tmp_path)
        until(lambda: not is_running(waiting))
        assert not result_of(tmp_path)["waited"]


def test_a_process_that_waits_ends_when_its_run_is_killed(tmp_path: Path) -> None:
    script = f"""
import time
from pipeline.processes.waiting import processes_ahead
from pipeline.recipe import AccelerateSettings
with processes_ahead([{MODULE!r}], AccelerateSettings(num_processes=1)):
    time.sleep(300)
"""
    with subprocess.Popen([sys.executable, "-c", script]) as run:
        waiting = waiting_pid(tmp_path)
        assert is_running(waiting)
        run.kill()
    until(lambda: not is_running(waiting), seconds=20)
