"""Processes that end with the one that started them, also when that one is killed."""

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

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the parent dies, and name this process as its children's parent.

    The request says nothing about a parent that was gone before it was made. So the id the parent left in the
    environment is compared afterwards; when another process is the parent by now, this one ends at once. On
    other systems than Linux only that comparison is made.

    Raises:
        SystemExit: With status 143, as after a SIGTERM: the parent was gone already.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_is_gone():
        raise SystemExit(128 + signal.SIGTERM)
    os.environ[PARENT_VARIABLE] = str(os.getpid())


def watch_parent(interval_s: float = WATCH_INTERVAL_S, *, last: Callable[[], object] = bool) -> None:
    """From now on, look whether the parent named in the environment is still there; end this process if not.

    Beside `end_with_parent`, for systems whose kernel does not tell, and for what a signal does not reach.
    To be called before it, which puts this process's own id in the place of the parent's.

    Args:
        interval_s: Between two looks.
        last: Done before the end, whose status is 143.
    """
    parent = int(os.environ.get(PARENT_VARIABLE, "0"))

    def watch() -> None:
        while not parent_is_gone(parent):
            time.sleep(interval_s)
        last()
        os._exit(128 + signal.SIGTERM)

    if parent:
        threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def end_now(status: int) -> NoReturn:
    """End the process without taking the interpreter apart, which takes torch a second and serves nobody.

    For the end of a process's main module: all files are closed by then, and no other thread has work.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def parent_is_gone(expected: int | None = None) -> bool:
    """Whether the parent is another process than `expected`, by default the one named in the environment.

    False when nobody was named: the module was then started by hand.
    """
    named = expected if expected is not None else int(os.environ.get(PARENT_VARIABLE, "0"))
    return named != 0 and os.getppid() != named
