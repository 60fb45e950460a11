"""Imports of large libraries without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None]:
    """Pause the garbage collector while the body imports libraries, and let it skip their objects later.

    It would visit all of them again and again: a fifth of the time that torch and diffusers need.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
