"""Waiting for a condition, with a limit."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    """Wait until the condition holds, at most `seconds`."""
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "timed out"
        time.sleep(0.05)
