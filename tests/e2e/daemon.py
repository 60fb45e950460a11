"""Processes of Dagster with a DAGSTER_HOME."""

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
"""Settings that `make ui` uses."""


def make_home(folder: Path) -> Path:
    """Create a DAGSTER_HOME with the project's settings."""
    folder.mkdir()
    shutil.copy(SETTINGS, folder)
    return folder


@contextmanager
def running(command: list[str], *, environment: dict[str, str], cwd: Path, log: Path) -> Generator[int]:
    """Start `command` in a new session, provide its process id, and stop it after the body."""
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


def until(condition: Callable[[], object], what: str, *, seconds: float, log: Path) -> None:
    """Wait until `condition()`, and fail with the end of the log after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(
                f"timed out after {seconds:g} s waiting for {what}:\n{log.read_text()[-3000:]}"
            )
        time.sleep(0.2)


def runs_of(instance: DagsterInstance) -> list[DagsterRun]:
    """Return all runs, the oldest first."""
    return list(instance.get_runs(ascending=True))


def succeeded(instance: DagsterInstance, number: int) -> bool:
    """Return whether there are exactly `number` runs, all of them successful."""
    return [run.status for run in runs_of(instance)] == [DagsterRunStatus.SUCCESS] * number
