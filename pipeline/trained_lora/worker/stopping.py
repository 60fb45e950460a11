"""A request to stop that is heard between two steps."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

STOPPED_STATUS = 128 + signal.SIGTERM
"""Exit status of a run that was asked to stop, and left a checkpoint."""


class StopRequest:
    """Becomes true when the process is asked to end, as often as it is asked."""

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.requested = False

    def request(self) -> None:
        """Ask."""
        self.requested = True


@contextmanager
def heard_signals() -> Generator[StopRequest]:
    """A `StopRequest` that SIGTERM and SIGINT raise while the body runs; afterwards they do what they did.

    To be used in the main thread.
    """
    stop = StopRequest()

    def ask(number: int, frame: FrameType | None) -> None:
        stop.request()

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
