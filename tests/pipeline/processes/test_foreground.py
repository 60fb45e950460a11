"""A command in the foreground: its output is shown, and a stop signal stops all of its processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest

from pipeline.processes.foreground import run_in_foreground

STUBBORN = (
    "import subprocess, sys, signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)\n"
)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run(code: str, folder: Path, grace_s: float = 5.0) -> tuple[int, signal.Signals | None, list[str]]:
    lines: list[str] = []
    status, received = run_in_foreground(
        [sys.executable, "-c", code],
        os.environ,
        output_file=folder / "output.txt",
        grace_s=grace_s,
        show=lines.append,
    )
    return status, received, lines


def test_output_is_shown_and_the_status_returned(tmp_path: Path) -> None:
    assert run("print('a'); print('b'); raise SystemExit(3)", tmp_path) == (3, None, ["a", "b"])


def test_the_last_line_is_shown_also_without_a_line_break(tmp_path: Path) -> None:
    _, _, lines = run("import os; os.write(2, b'a\\nout of mem'); os._exit(1)", tmp_path)
    assert lines == ["a", "out of mem"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_all_processes_and_is_returned(tmp_path: Path, number: signal.Signals) -> None:
    handler = signal.getsignal(number)
    started = threading.Timer(2.0, os.kill, (os.getpid(), number))
    started.start()
    status, received, lines = run(STUBBORN, tmp_path, grace_s=0.5)
    assert (status, received) == (-signal.SIGKILL, number)
    assert not is_alive(int(lines[0]))
    assert signal.getsignal(number) is handler


def test_the_command_has_a_session_of_its_own_which_ctrl_c_does_not_reach(tmp_path: Path) -> None:
    status, _, lines = run("import os; print(os.getsid(0) == os.getpid())", tmp_path)
    assert (status, lines) == (0, ["True"])


def test_processes_that_the_command_left_behind_are_stopped(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)\n"
    )
    status, _, lines = run(code, tmp_path)
    assert status == 0
    assert not is_alive(int(lines[0]))
