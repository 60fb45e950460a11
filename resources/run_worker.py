"""The process of a run records its machine, and stops when the code server that started it dies."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import threading
from functools import lru_cache
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster import DagsterInstance, DagsterRun

MACHINE_TAG = "latentline/machine"
"""Tag of a run with the host name of the machine that executes it."""


MACHINE_RUN_TAG = "latentline/machine_run"
"""Tag of a run with its own id, set together with `MACHINE_TAG`.

A re-execution has all tags of its parent, so another id means that the machine is the parent's.
"""

_recorded = set[str]()
"""Runs whose machine this process has recorded."""


def record_machine(instance: DagsterInstance, run_id: str) -> None:
    """Tag the run with this machine, so that other machines do not look for its process."""
    if run_id not in _recorded:
        # Undocumented: a run has no public place for facts about its execution.
        instance.add_run_tags(run_id, {MACHINE_TAG: platform.node(), MACHINE_RUN_TAG: run_id})
        _recorded.add(run_id)


def has_machine(run: DagsterRun) -> bool:
    """Return whether `MACHINE_TAG` is the machine of this run, and not of the run that it re-executes."""
    return run.tags.get(MACHINE_RUN_TAG) == run.run_id


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
