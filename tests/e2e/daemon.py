"""Dagster's own processes with a DAGSTER_HOME, for the tests that need them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ROOT / ".dagster" / "dagster.yaml"
"""What `make ui` uses."""


def make_home(folder: Path) -> Path:
    """A DAGSTER_HOME with the project's settings."""
    folder.mkdir()
    shutil.copy(SETTINGS, folder)
    return folder


@contextmanager
def running(command: list[str], *, environment: dict[str, str], cwd: Path, log: Path) -> Generator[int]:
    """The process id of `command`, in a session of its own, while it runs; afterwards it is stopped."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, cwd=cwd, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process.pid
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def until(met: Callable[[], object], what: str, *, seconds: float, log: Path) -> None:
    """Return when `met()`; fails with the end of the log when that takes too long."""
    end = time.monotonic() + seconds
    while not met():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds:g} s in vain for {what}:\n{log.read_text()[-3000:]}")
        time.sleep(0.2)


def runs_of(instance: DagsterInstance) -> list[DagsterRun]:
    """All runs, the oldest first."""
    return list(instance.get_runs(ascending=True))


def succeeded(instance: DagsterInstance, number: int) -> bool:
    """Whether there are so many runs, and all ended well."""
    return [run.status for run in runs_of(instance)] == [DagsterRunStatus.SUCCESS] * number
