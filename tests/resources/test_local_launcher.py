"""Real launches: accelerate under Dagster, stopped in each way that a step can end."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from dagster import AssetExecutionContext, DagsterInstance, Output, asset, materialize
from dagster._core.errors import DagsterExecutionInterruptedError
from pydantic import ValidationError

from pipeline.errors import LaunchError, StoreError, TrainingError
from pipeline.processes.launch import TRAINING_MODULE, Meanwhile
from pipeline.recipe import AccelerateSettings
from pipeline.sweep.concurrency import call_concurrently
from resources.local_launcher import GPUS_VARIABLE, AccelerateLauncher, Observer, own_gpus
from tests.refused_events import MESSAGE, events_refused
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]

MAIN_THREAD = threading.main_thread().ident or 0

ENTRY = """
import json, os, pathlib, signal, subprocess, sys, time
from pipeline.processes.pipes import rank, reporter
from pipeline.errors import TrainingError

with reporter() as report:
    order = json.loads(pathlib.Path(sys.argv[1]).read_text())
    folder = pathlib.Path(sys.argv[1]).parent
    report.info(f"rank {rank()} of {os.environ.get('WORLD_SIZE', '1')} is up")
    report.info(f"session {os.getsid(0)}")
    if order["do"] == "raise":
        raise TrainingError("loss is NaN", where="step 3", fix="lower the learning rate")
    if order["do"] == "crash":
        print("the last line of a crash", file=sys.stderr)
        os._exit(9)
    if order["do"] == "print":
        print("the first line", flush=True)
        time.sleep(1)
        print("a line without an end", end="", flush=True)
    if order["do"] == "leave":
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        (folder / "pid-left").write_text(str(left.pid))
    if order["do"] == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / f"pid-{rank()}").write_text(str(os.getpid()))
        time.sleep(300)
    if order["do"] == "sleep":
        def stop(*_):
            (folder / f"checkpoint-{rank()}").touch()
            sys.exit(143)
        signal.signal(signal.SIGTERM, stop)
        print("a line that is being written", end="", flush=True)
        (folder / f"pid-{rank()}").write_text(str(os.getpid()))
        time.sleep(300)
"""

STEP = """
import sys
from pathlib import Path
from dagster import AssetExecutionContext, asset, materialize
from pipeline.recipe import AccelerateSettings
from resources.local_launcher import AccelerateLauncher

@asset
def work(context: AssetExecutionContext, launcher: AccelerateLauncher) -> None:
    settings = AccelerateSettings(num_processes=int(sys.argv[2]))
    launcher.bind(context, settings)("entry_under_test", Path(sys.argv[1]))

materialize([work], resources={"launcher": AccelerateLauncher(grace_s=float(sys.argv[3]))})
"""


@pytest.fixture(autouse=True)
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "entry_under_test.py").write_text(ENTRY, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")


def job_file(folder: Path, do: str) -> Path:
    file = folder / "order.json"
    file.write_text(json.dumps({"do": do}), encoding="utf-8")
    return file


def launch_in_process(
    file: Path,
    meanwhile: Meanwhile | None = None,
    *,
    module: str = "entry_under_test",
    num_processes: int = 1,
    launcher: AccelerateLauncher | None = None,
    observer: Observer | None = None,
) -> tuple[list[str], Exception | None]:
    """Return the messages in Dagster's log, and the error that the launch raised."""
    errors: list[Exception] = []
    resources = {"launcher": launcher or AccelerateLauncher()}

    @asset
    def work(context: AssetExecutionContext, launcher: AccelerateLauncher) -> Iterator[Output[int]]:
        try:
            settings = AccelerateSettings(num_processes=num_processes)
            launcher.bind(context, settings, observer)(module, file, meanwhile)
        except Exception as err:
            errors.append(err)
        yield Output(1)

    with DagsterInstance.ephemeral() as instance:
        result = materialize([work], resources=resources, instance=instance)
        messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
    return messages, errors[0] if errors else None


def descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [
        process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def start_step(
    file: Path, num_processes: int, grace_s: float = 10
) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    step = subprocess.Popen(
        [sys.executable, "-c", STEP, str(file), str(num_processes), str(grace_s)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pids = [file.parent / f"pid-{rank}" for rank in range(num_processes)]
    until(lambda: all(pid.is_file() and pid.read_text() != "" for pid in pids))
    processes = descendants(step)
    assert {int(pid.read_text()) for pid in pids} <= {process.pid for process in processes}
    return step, processes


def test_the_messages_of_a_worker_are_in_dagsters_log_and_a_good_launch_returns(tmp_path: Path) -> None:
    messages, error = launch_in_process(job_file(tmp_path, "return"))
    assert error is None
    assert "rank 0 of 1 is up" in messages
    assert [line for line in messages if "other machines" in line] == []
    assert f"session {os.getsid(0)}" not in messages, "a terminal's Ctrl-C would reach the worker"


def test_an_observer_is_called_while_the_processes_run_and_once_after_they_have_ended(tmp_path: Path) -> None:
    file = job_file(tmp_path, "print")
    observed: list[Path] = []
    calls: list[bool] = []

    def observer(observed_order: Path) -> Callable[[bool], object]:
        observed.append(observed_order)
        return calls.append

    assert launch_in_process(file, observer=observer)[1] is None
    assert observed == [file]
    assert (5 < len(calls) < 2000, set(calls[:-1]), calls[-1]) == (True, {False}, True), "20 times per second"


def test_the_default_of_the_grace_period_is_the_documented_one() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert f"{AccelerateLauncher().grace_s:g} by default" in text
    assert AccelerateLauncher(grace_s=0, machines=1, wait_s=1).grace_s == 0


@pytest.mark.parametrize("wrong", [{"grace_s": -1}, {"machines": 0}, {"wait_s": 0}], ids=str)
def test_impossible_settings_of_the_launcher_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        AccelerateLauncher(**wrong)


def test_each_line_that_a_worker_prints_is_forwarded_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch_in_process(job_file(tmp_path, "print"))
    forwarded = capsys.readouterr().err
    for line in ("the first line", "a line without an end"):
        assert forwarded.count(line) == 1, f"{line!r} in {forwarded!r}"


def test_a_line_is_forwarded_while_the_worker_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forwarded: list[str] = []

    def observer(_: Path) -> Callable[[bool], object]:
        return lambda final: None if final else forwarded.append(capsys.readouterr().err)

    assert launch_in_process(job_file(tmp_path, "print"), observer=observer)[1] is None
    assert "the first line" in "".join(forwarded)


def test_R12_a_process_that_a_worker_leaves_behind_is_stopped(tmp_path: Path) -> None:
    launcher = AccelerateLauncher(grace_s=0.5)
    assert launch_in_process(job_file(tmp_path, "leave"), launcher=launcher)[1] is None
    pid = int((tmp_path / "pid-left").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_L08_an_error_of_a_worker_keeps_its_three_parts(tmp_path: Path) -> None:
    _, error = launch_in_process(job_file(tmp_path, "raise"))
    assert isinstance(error, TrainingError)
    assert (error.what, error.where, error.fix) == ("loss is NaN", "step 3", "lower the learning rate")


def test_L08_a_crash_of_a_worker_is_an_error_that_quotes_its_output(tmp_path: Path) -> None:
    _, error = launch_in_process(job_file(tmp_path, "crash"))
    assert isinstance(error, LaunchError)
    assert "exit status 9" in error.what
    assert "the last line of a crash" in error.what


def test_an_error_of_meanwhile_ends_the_running_processes_after_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = job_file(tmp_path, "sleep")
    workers: list[psutil.Process] = []

    def meanwhile() -> None:
        until(lambda: (tmp_path / "pid-0").is_file() and (tmp_path / "pid-0").read_text() != "")
        workers.append(psutil.Process(int((tmp_path / "pid-0").read_text())))
        raise StoreError("no room", where="disk", fix="free some")

    messages, error = launch_in_process(file, meanwhile)
    assert isinstance(error, StoreError)
    assert alive(workers) == []
    assert (tmp_path / "checkpoint-0").is_file()
    assert "stopped all processes (StoreError); 0 were killed" in messages
    assert capsys.readouterr().err.count("a line that is being written") == 1


def launch_without_events(file: Path, home: Path, meanwhile: Meanwhile | None = None) -> Exception | None:
    """Launch in a step whose event log refuses events until the launch has ended; return its error."""
    errors: list[Exception] = []
    home.mkdir()

    @asset
    def work(context: AssetExecutionContext, launcher: AccelerateLauncher) -> Iterator[Output[int]]:
        with events_refused(home):
            try:
                launcher.bind(context, AccelerateSettings())("entry_under_test", file, meanwhile)
            except Exception as err:
                errors.append(err)
        yield Output(1)

    with DagsterInstance.local_temp(str(home)) as instance:
        assert materialize([work], resources={"launcher": AccelerateLauncher()}, instance=instance).success
    return errors[0] if errors else None


def test_an_interruption_without_the_event_log_ends_the_processes_after_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = job_file(tmp_path, "sleep")
    workers: list[psutil.Process] = []

    def meanwhile() -> None:
        until(lambda: (tmp_path / "pid-0").is_file() and (tmp_path / "pid-0").read_text() != "")
        workers.append(psutil.Process(int((tmp_path / "pid-0").read_text())))
        raise StoreError("no room", where="disk", fix="free some")

    error = launch_without_events(file, tmp_path / "dagster", meanwhile)
    assert isinstance(error, StoreError), "the error of the log must not hide that of the step"
    assert alive(workers) == []
    assert (tmp_path / "checkpoint-0").is_file()
    errors = capsys.readouterr().err
    assert MESSAGE in errors
    assert "INFO: stopped all processes (StoreError); 0 were killed\n" in errors


def test_the_log_of_a_worker_is_printed_while_the_event_log_refuses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch_without_events(job_file(tmp_path, "nothing"), tmp_path / "dagster") is None
    lines = capsys.readouterr().err.splitlines()
    assert "INFO: rank 0 of 1 is up" in lines
    assert any(line.startswith("INFO: session ") for line in lines), "later lines are printed too"


@pytest.mark.parametrize(
    ("number", "num_processes"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 1), pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow)],
)
def test_R12_a_stopped_step_leaves_a_checkpoint_and_no_process(
    tmp_path: Path, number: int, num_processes: int
) -> None:
    step, processes = start_step(job_file(tmp_path, "sleep"), num_processes)
    step.send_signal(number)
    step.wait(60)
    assert alive(processes) == []
    assert [(tmp_path / f"checkpoint-{rank}").is_file() for rank in range(num_processes)] == [
        True
    ] * num_processes


@pytest.mark.slow
def test_R12_a_worker_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    step, processes = start_step(job_file(tmp_path, "ignore"), 1, grace_s=0.5)
    step.send_signal(signal.SIGTERM)
    step.wait(60)
    assert alive(processes) == []


@pytest.mark.parametrize("do", ["ignore", "sleep"])
def test_R12_a_stop_of_concurrent_trainings_ends_a_process_that_a_thread_waits_for(
    tmp_path: Path, do: str
) -> None:
    file = job_file(tmp_path, do)
    pid_file = tmp_path / "pid-0"

    @asset
    def work(context: AssetExecutionContext, launcher: AccelerateLauncher) -> None:
        launch = launcher.bind(context, AccelerateSettings())

        def interrupt() -> None:
            until(lambda: pid_file.exists() and pid_file.read_text() != "")
            signal.pthread_kill(MAIN_THREAD, signal.SIGINT)

        call_concurrently([lambda: launch("entry_under_test", file), interrupt], 2)

    with DagsterInstance.ephemeral() as instance, pytest.raises(DagsterExecutionInterruptedError):
        materialize([work], resources={"launcher": AccelerateLauncher(grace_s=1)}, instance=instance)
    assert not psutil.pid_exists(int(pid_file.read_text()))
    assert (tmp_path / "checkpoint-0").exists() == (do == "sleep")


def test_R12_the_processes_of_a_killed_step_end_after_a_checkpoint(tmp_path: Path) -> None:
    step, processes = start_step(job_file(tmp_path, "sleep"), 1)
    step.kill()
    step.wait(60)
    until(lambda: alive(processes) == [], seconds=10)
    assert (tmp_path / "checkpoint-0").is_file()


@pytest.mark.slow
def test_R12_workers_end_when_accelerate_itself_is_killed(tmp_path: Path) -> None:
    step, processes = start_step(job_file(tmp_path, "sleep"), 2)
    launcher = psutil.Process(int((tmp_path / "pid-0").read_text())).parent()
    assert launcher is not None
    assert launcher.pid != step.pid
    launcher.kill()
    assert step.wait(60) != 0
    assert alive(processes) == []
    assert [(tmp_path / f"checkpoint-{rank}").is_file() for rank in (0, 1)] == [True, True]


def test_encoding_uses_the_processes_of_this_machine_alone(tmp_path: Path) -> None:
    launcher = AccelerateLauncher(machines=2, master="node1:29500")
    messages, error = launch_in_process(job_file(tmp_path, "nothing"), num_processes=2, launcher=launcher)
    assert error is None
    assert "rank 0 of 1 is up" in messages

    _, error = launch_in_process(job_file(tmp_path, "nothing"), num_processes=3, launcher=launcher)
    assert isinstance(error, LaunchError)
    assert "divisible by the number of machines" in error.what


@pytest.mark.parametrize("outputs", [pytest.param("/shared/out", marks=pytest.mark.slow), "s3://bucket/out"])
def test_a_training_waits_for_the_other_machines_and_logs_their_command(tmp_path: Path, outputs: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{probe.getsockname()[1]}"
    launcher = AccelerateLauncher(machines=2, master=master, wait_s=1)
    file = job_file(tmp_path, "nothing")
    fields = {**json.loads(file.read_text()), "run": "0123", "recipe": {"output_address": outputs}}
    file.write_text(json.dumps(fields))
    messages, error = launch_in_process(file, module=TRAINING_MODULE, num_processes=2, launcher=launcher)
    place = "s3://bucket/out/runs/0123" if "://" in outputs else file
    command = f"on machine 1: latentline train {place} --machines 2 --rank 1 --master {master}"
    assert f"waiting for the other machines; {command}" in messages
    assert isinstance(error, LaunchError)
    assert error.what.startswith("not all other machines connected within 1 s")


def test_trainings_at_the_same_time_have_gpus_of_their_own() -> None:
    assert [own_gpus(place, 2, None)[GPUS_VARIABLE] for place in range(2)] == ["0,1", "2,3"]
    assert own_gpus(1, 1, "5,MIG-7") == {GPUS_VARIABLE: "MIG-7"}
    assert own_gpus(1, 1, "") == {}, "the user hides all GPUs"
    with pytest.raises(LaunchError, match="training 2 at the same time has no GPU to itself") as excinfo:
        own_gpus(1, 2, "0,1,2")
    assert excinfo.value.fix.startswith("lower it to 1 or less")
