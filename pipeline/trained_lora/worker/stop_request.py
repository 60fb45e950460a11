"""Requests to stop a training process after its current step, by signal or by a file in the run's folder."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pipeline.processes.guard import ORPHAN_GRACE_S
from pipeline.processes.tree import ProcessTree

STOPPED_STATUS = 128 + signal.SIGTERM
"""Exit status of a process that saved a checkpoint and stopped on request."""


@dataclass
class StopRequest:
    """A request that makes the loop stop after the current step.

    Attributes:
        file: File that is a request too if it exists; None without one.
    """

    requested: bool = False
    file: Path | None = None

    def poll(self) -> bool:
        """Return whether the loop shall stop, after looking for the file."""
        self.requested = self.requested or (self.file is not None and self.file.exists())
        return self.requested


@contextmanager
def stop_on_signals(file: Path | None = None) -> Generator[StopRequest]:
    """Turn SIGTERM, SIGINT and the existence of `file` into a `StopRequest`; call it in the main thread."""
    stop = StopRequest(file=file)

    def request_stop(number: int, frame: FrameType | None) -> None:
        # Only noted: a handler may run at any line, and a checkpoint needs a complete step.
        stop.requested = True

    numbers = (signal.SIGTERM, signal.SIGINT)
    previous_handlers = {number: signal.signal(number, request_stop) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def stop_orphan(grace_s: float = ORPHAN_GRACE_S) -> None:
    """Request a stop of this process, wait for a checkpoint, then stop its descendants.

    It returns only if the process has not ended within `grace_s`. Call it in a thread, when the process that
    started this one is gone.
    """
    # On Linux, the kernel has sent the same signal (`end_with_parent`).
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    ProcessTree(os.getpid()).stop_below(grace_s=0)
