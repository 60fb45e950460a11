"""Guards for launched processes: they end with the process that started them, even if it is killed."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from pipeline.processes.launch import PARENT_VARIABLE

WATCH_INTERVAL_S = 0.5

ORPHAN_GRACE_S = 4.0
"""Seconds that training has for a checkpoint when the process that started it is gone."""

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Request a SIGTERM for the death of the parent, and become the guarded parent of own children.

    Outside of Linux, this only ends a process that has lost its parent already.

    Raises:
        SystemExit: The parent is gone already. The status is 143, as after a SIGTERM.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")

    # The kernel does not report a parent that died before the request.
    if parent_is_gone():
        raise SystemExit(128 + signal.SIGTERM)
    os.environ[PARENT_VARIABLE] = str(os.getpid())


def watch_parent(
    interval_s: float = WATCH_INTERVAL_S, *, on_death: Callable[[], object] | None = None
) -> None:
    """Poll for the parent named in the environment, and end this process with status 143 when it is gone.

    This complements `end_with_parent` on systems without its kernel request, and for processes that block or
    ignore the signal. Call it first. `on_death` is called before this process ends.
    """
    # Read now, because `end_with_parent` replaces it.
    parent = int(os.environ.get(PARENT_VARIABLE, "0"))

    def watch() -> None:
        while not parent_is_gone(parent):
            time.sleep(interval_s)
        if on_death is not None:
            on_death()

        # From a thread, `sys.exit` would end only the thread.
        os._exit(128 + signal.SIGTERM)

    if parent:
        threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def end_now(status: int) -> NoReturn:
    """End the process without finalizing the interpreter.

    Call it at the end of a main module, when all files are closed and all threads are idle.
    """
    # Finalizing takes torch about a second, so only the streams are flushed.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def parent_is_gone(expected: int | None = None) -> bool:
    """Return whether the parent is not `expected`, by default the process named in the environment."""
    parent = expected if expected is not None else int(os.environ.get(PARENT_VARIABLE, "0"))

    # A module that was started by hand has no named parent.
    return parent != 0 and os.getppid() != parent
