"""Requests to stop a training process after its current step, by signal."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOPPED_STATUS = 128 + signal.SIGTERM
"""Exit status of a process that saved a checkpoint and stopped on request."""


@dataclass
class StopRequest:
    """A flag that makes the loop stop after the current step."""

    requested: bool = False


@contextmanager
def stop_on_signals() -> Generator[StopRequest]:
    """Turn SIGTERM and SIGINT into a `StopRequest` within the context, in the main thread only."""
    stop = StopRequest()

    def request_stop(number: int, frame: FrameType | None) -> None:
        stop.requested = True

    numbers = (signal.SIGTERM, signal.SIGINT)
    previous_handlers = {number: signal.signal(number, request_stop) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
