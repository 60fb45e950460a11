"""A run that a code server started for the UI, a schedule or a sensor stops when that server dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from functools import lru_cache
from multiprocessing.connection import wait


@lru_cache(maxsize=1)
def end_with_code_server() -> None:
    """Send this process a SIGTERM when the code server that started it dies.

    Dagster starts a run as a child process of its code server, and nothing waits for an orphan. Dagster turns
    the signal into an interruption of the step, as for the UI's stop button, so a training writes its
    checkpoint first. A process that no other Python process started, as in `dagster job execute`, is not
    affected. Repeated calls are ignored.
    """
    server = multiprocessing.parent_process()
    if server is not None:
        threading.Thread(target=_watch, args=(server.sentinel,), daemon=True).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
