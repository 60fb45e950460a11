"""A stop of threads that wait for launched processes: Python raises signals in the main thread only."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from pipeline.errors import StoppedError

_thread = threading.local()


@contextmanager
def stopped_by(event: threading.Event) -> Generator[None]:
    """Let `pause` raise an error in this thread as soon as the event is set."""
    _thread.event = event
    try:
        yield
    finally:
        del _thread.event


def pause(seconds: float) -> None:
    """Sleep in a loop that waits for processes.

    Raises:
        StoppedError: The event of this thread is set.
    """
    event: threading.Event | None = getattr(_thread, "event", None)
    if event is None:
        time.sleep(seconds)
    elif event.wait(seconds):
        raise StoppedError(
            "another thread ended or was stopped",
            where=f"machine {platform.node()}, {threading.current_thread().name}",
            fix="start the same job again; it continues from the last checkpoint",
        )
