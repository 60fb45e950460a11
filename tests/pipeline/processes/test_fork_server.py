"""A job gets a process that has imported already, is like any other, and never outlives its run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.encoding.workers import WORKERS
from pipeline.processes.fork_server import StartedProcess, fork_server, start_process
from pipeline.processes.launch import TRAINING_MODULE, launch_command, launch_environment
from pipeline.recipe import AccelerateSettings
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = AccelerateSettings(num_processes=1)
MODULE = "entry_that_waits"

ENTRY = """
import json, os, sys, time
from pathlib import Path
from pipeline.processes.guard import watch_parent
from pipeline.processes.launch import ERROR_FILE_VARIABLE

def import_libraries():
    folder = Path(__file__).parents[1]
    (folder / "imported").write_text(str(os.getpid()))
    while (folder / "slow").exists():
        time.sleep(0.01)
    if (folder / "fails").exists():
        raise ImportError("no such library")
    if (folder / "dies").exists():
        os._exit(1)

if __name__ == "__main__":
    watch_parent()
    print("printed", flush=True)
    print("an error", file=sys.stderr, flush=True)
    names = (ERROR_FILE_VARIABLE, "OF_THE_JOB")
    result = {name: os.environ.get(name) for name in names}
    result["has_imported_torch"] = "torch" in sys.modules
    result |= {"server": os.getppid(), "pid": os.getpid(), "session": os.getsid(0), "arguments": sys.argv[1:]}
    Path(sys.argv[1]).write_text(json.dumps(result))
    time.sleep(float(os.environ.get("SLEEP_S", "0")))
    sys.exit(7)
"""


TORCH = """
import os
counted_by = os.getpid()

class cuda:
    def device_count():
        return {gpus}
    def init():
        if {initialised} and os.getpid() != counted_by:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
"""
"""A stand-in for torch, which takes seconds to import, with GPUs and with CUDA in the server or not."""


@pytest.fixture(autouse=True)
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / MODULE).mkdir()
    (tmp_path / MODULE / "__init__.py").touch()
    (tmp_path / MODULE / "__main__.py").write_text(ENTRY, encoding="utf-8")
    (tmp_path / "torch.py").write_text(TORCH.format(gpus=0, initialised=False), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")


def server_pid(folder: Path) -> int:
    file = folder / "imported"
    until(lambda: file.exists() and file.read_text())
    return int(file.read_text())


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def start(folder: Path, **variables: str) -> StartedProcess:
    """Start the entry module as a launcher does."""
    environment = launch_environment(SETTINGS, folder / "error.json") | variables
    with (folder / "output.txt").open("wb") as file:
        return start_process(launch_command(SETTINGS, MODULE, folder / "job.json"), environment, file)


def result_of(folder: Path, **variables: str) -> dict[str, Any]:
    """Start the entry module, and return what it found."""
    folder.mkdir(exist_ok=True)
    process = start(folder, **variables)
    assert process.wait() == process.poll() == 7
    assert (folder / "output.txt").read_text().splitlines() == ["printed", "an error"]
    result = json.loads((folder / "job.json").read_text())
    assert result["pid"] == result["session"] == process.pid
    assert result["arguments"] == [str(folder / "job.json")]
    shutil.rmtree(folder)
    return result


def test_each_job_is_a_process_of_its_own_with_its_variables_output_and_status(tmp_path: Path) -> None:
    with fork_server([MODULE], SETTINGS):
        first = result_of(tmp_path / "first", OF_THE_JOB="a value")
        second = result_of(tmp_path / "second")
        server = server_pid(tmp_path)
        assert [first["server"], second["server"]] == [server, server]
        assert first["pid"] != second["pid"]
    assert first["OF_THE_JOB"] == "a value"
    assert second["OF_THE_JOB"] is None
    assert first["LATENTLINE_ERROR_FILE"] == str(tmp_path / "first" / "error.json")
    assert not is_running(server)


def test_the_server_becomes_the_last_process_of_its_run(tmp_path: Path) -> None:
    with fork_server([MODULE], SETTINGS, last=MODULE):
        last = result_of(tmp_path / "last", OF_THE_JOB="a value")
        assert last["pid"] == server_pid(tmp_path)
        assert last["server"] == os.getpid()
        assert last["OF_THE_JOB"] == "a value"
        # As after a step that Dagster repeats.
        again = result_of(tmp_path / "again")
        assert again["pid"] != last["pid"]


def test_the_last_process_can_be_killed_and_no_other_waits_for_it(tmp_path: Path) -> None:
    with fork_server([MODULE], SETTINGS, last=MODULE):
        last = start(tmp_path, SLEEP_S="300")
        assert result_of(tmp_path / "job")["server"] == os.getpid()
        os.kill(last.pid, signal.SIGKILL)
        assert last.wait() == -signal.SIGKILL
    with fork_server([MODULE], SETTINGS, last=MODULE):
        last = start(tmp_path, SLEEP_S="300")
        assert is_running(last.pid)
    assert not is_running(last.pid), "it ends with its run"


def test_a_server_within_another_is_the_same(tmp_path: Path) -> None:
    with fork_server([MODULE], SETTINGS):
        server = server_pid(tmp_path)
        with fork_server([MODULE], SETTINGS):
            pass
        assert result_of(tmp_path / "job")["server"] == server


def test_a_job_with_other_settings_is_not_forked(tmp_path: Path) -> None:
    with fork_server([MODULE], SETTINGS):
        assert result_of(tmp_path / "job", OMP_NUM_THREADS="7")["server"] == os.getpid()


def test_a_job_beside_another_is_not_forked(tmp_path: Path) -> None:
    with fork_server([MODULE], SETTINGS):
        other = start(tmp_path, SLEEP_S="300")
        assert result_of(tmp_path / "job")["server"] == os.getpid()
        os.kill(other.pid, signal.SIGKILL)
        assert other.wait() == -signal.SIGKILL


def test_jobs_of_two_threads_start_at_the_same_time(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    with fork_server([MODULE], SETTINGS), ThreadPoolExecutor() as threads:
        jobs = [threads.submit(result_of, tmp_path / name) for name in ("one", "two")]
        first, (other,) = wait(jobs, timeout=60, return_when=FIRST_COMPLETED)
        (tmp_path / "slow").unlink()
        assert first.pop().result()["server"] == os.getpid(), "it has not waited for the imports"
        assert other.result()["server"] == server_pid(tmp_path)


def test_a_job_is_forked_from_a_server_with_failed_imports_and_reports_why(tmp_path: Path) -> None:
    (tmp_path / "fails").touch()
    with fork_server([MODULE], SETTINGS):
        assert result_of(tmp_path / "job")["server"] == server_pid(tmp_path)


def test_a_job_starts_without_a_server_that_has_died(tmp_path: Path) -> None:
    (tmp_path / "dies").touch()
    with fork_server([MODULE], SETTINGS):
        server = server_pid(tmp_path)
        until(lambda: not is_running(server))
        assert result_of(tmp_path / "job")["server"] == os.getpid()


def test_a_job_ends_with_its_server_and_has_the_status_of_its_server(tmp_path: Path) -> None:
    with fork_server([MODULE], SETTINGS):
        process = start(tmp_path, SLEEP_S="300")
        os.kill(server_pid(tmp_path), signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        until(lambda: not is_running(process.pid), seconds=20)


@pytest.mark.parametrize("initialised", [False, True])
def test_a_process_is_forked_with_a_gpu_unless_the_server_has_initialised_cuda(
    tmp_path: Path, initialised: bool
) -> None:
    (tmp_path / "torch.py").write_text(TORCH.format(gpus=1, initialised=initialised), encoding="utf-8")
    with fork_server([MODULE], SETTINGS):
        result = result_of(tmp_path / "job")
        assert result["server"] == server_pid(tmp_path)
    assert result["has_imported_torch"] == (not initialised), "Python has started again in the same process"


USES_OF_CUDA = r"""
import sys, torch, traceback
uses = []

def record(*arguments):
    uses.append("".join(traceback.format_stack(limit=6)))
    return 0

# CUDA's driver is initialised by both, and by nothing else in torch.cuda. NVML counts GPUs without it.
torch._C._cuda_getDeviceCount = torch._C._cuda_init = torch.cuda._lazy_init = record
torch.cuda._is_compiled = lambda: True
torch.cuda.device_count = lambda: 1
for module in sys.argv[1:]:
    __import__(f"{module}.__main__", fromlist=["*"]).import_libraries()
print("\n".join(uses))
assert not torch.cuda.is_initialized()
"""


def test_the_imports_of_the_server_initialise_no_cuda_on_a_machine_with_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # with the real torch
    modules = [WORKERS["latents"], WORKERS["text"], TRAINING_MODULE]
    command = [sys.executable, "-c", USES_OF_CUDA, *modules]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stdout.strip()) == (0, ""), completed.stdout + completed.stderr


@pytest.mark.parametrize("last", [None, MODULE])
def test_server_and_job_end_when_their_run_is_killed(tmp_path: Path, last: str | None) -> None:
    script = f"""
import os
from pathlib import Path
from pipeline.processes.launch import launch_command, launch_environment
from pipeline.processes.fork_server import fork_server, start_process
from pipeline.recipe import AccelerateSettings
settings, folder = AccelerateSettings(num_processes=1), Path({str(tmp_path)!r})
variables = launch_environment(settings, folder / "error.json") | {{"SLEEP_S": "300"}}
with fork_server([{MODULE!r}], settings, last={last!r}), (folder / "output.txt").open("wb") as output:
    start_process(launch_command(settings, {MODULE!r}, folder / "job.json"), variables, output).wait()
"""
    with subprocess.Popen([sys.executable, "-c", script]) as run:
        job = tmp_path / "job.json"
        until(lambda: job.exists() and job.read_text())
        pids = [json.loads(job.read_text())["pid"], server_pid(tmp_path)]
        assert all(map(is_running, pids))
        run.kill()
    until(lambda: not any(map(is_running, pids)), seconds=20)
