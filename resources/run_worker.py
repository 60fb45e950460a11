"""The process of a run holds its lock, records its machine, and stops when its code server dies."""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import platform
import signal
import threading
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster import DagsterInstance, DagsterRun

MACHINE_TAG = "latentline/machine"
"""Tag of a run with the host name of the machine that executes it."""


MACHINE_RUN_TAG = "latentline/machine_run"
"""Tag of a run with its own id, set together with `MACHINE_TAG`.

A re-execution has all tags of its parent, so another id means that the machine is the parent's.
"""

PID_NAMESPACE_TAG = "latentline/pid_namespace"
"""Tag of a run with the `pid_namespace` of its process, set together with `MACHINE_TAG` since 0.4.0."""

_FOLDER = "latentline_runs"
"""Folder in DAGSTER_HOME with the lock of each run that is in progress."""

_recorded = set[str]()
"""Runs whose machine this process has recorded."""


def record_machine(instance: DagsterInstance, run_id: str) -> None:
    """Tag the run with this machine, so that other machines do not look for its process."""
    if run_id not in _recorded:
        # Undocumented: a run has no public place for facts about its execution.
        machine = {MACHINE_TAG: platform.node(), MACHINE_RUN_TAG: run_id, PID_NAMESPACE_TAG: pid_namespace()}
        instance.add_run_tags(run_id, machine)
        _recorded.add(run_id)


def has_machine(run: DagsterRun) -> bool:
    """Return whether `MACHINE_TAG` is the machine of this run, and not of the run that it re-executes."""
    return run.tags.get(MACHINE_RUN_TAG) == run.run_id


@lru_cache(maxsize=1)
def pid_namespace() -> str:
    """Return the boot and the namespace of this process's id; "unknown" on systems without /proc."""
    # Containers with the same host name number their processes separately.
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return "unknown"


def lock_run(instance: DagsterInstance, run_id: str) -> None:
    """Hold the lock of a run until this process ends, however it ends.

    Without an error if the disk does not support locks; `is_locked` then returns None.
    """
    path = run_lock(instance, run_id)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        atexit.register(path.unlink, missing_ok=True)


def is_locked(instance: DagsterInstance, run_id: str) -> bool | None:
    """Return whether a process holds the lock of the run; None if this DAGSTER_HOME has no such lock."""
    try:
        with run_lock(instance, run_id).open("rb") as file:
            # Shared, so that two processes that look at the same time do not see each other.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def run_lock(instance: DagsterInstance, run_id: str) -> Path:
    """Return the path of the lock of a run."""
    # Undocumented: the variable DAGSTER_HOME may belong to another instance.
    return Path(instance.root_directory) / _FOLDER / f"{run_id}.lock"


@lru_cache(maxsize=1)
def end_with_code_server() -> None:
    """Send this process a SIGTERM when the code server that started it dies; repeated calls are ignored."""
    # Dagster starts a run as a child process of its code server, and nothing waits for an orphan. The process
    # of `dagster job execute` has no such parent.
    server = multiprocessing.parent_process()
    if server is not None:
        threading.Thread(target=_watch, args=(server.sentinel,), daemon=True).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    # Dagster turns the signal into an interruption of the step, as for the UI's stop button, so that a
    # training writes its checkpoint first.
    os.kill(os.getpid(), signal.SIGTERM)
