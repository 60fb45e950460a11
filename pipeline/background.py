"""Work in a thread while the body of a `with` statement runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def in_background(work: Callable[[threading.Event], object], *, name: str) -> Generator[None]:
    """Run `work` in a thread during the body, and wait for its end, however the body ends.

    `work` must return soon after the event that it receives is set, and handle its own errors.
    """
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
