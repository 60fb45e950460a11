"""Processes that end with the one that started them, also when that one is killed."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from typing import NoReturn

from pipeline.launching import PARENT_VARIABLE

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
