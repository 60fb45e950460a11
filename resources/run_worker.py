"""A run that a code server started (UI, schedule, sensor) ends with that server."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from functools import lru_cache
from multiprocessing.connection import wait


@lru_cache(maxsize=1)
def end_with_code_server() -> None:
    """From now on, this process is asked to stop as soon as the server that started it has died.

    Dagster starts a run as a child of its code server, and nobody waits for an orphan. It is stopped as
    the UI stops it, by a signal that Dagster raises in the step: a training writes its checkpoint first.
    Once a process; nothing happens in one that no other Python process has started, as in `job execute`.
    """
    server = multiprocessing.parent_process()
    if server is not None:
        threading.Thread(target=_watch, args=(server.sentinel,), daemon=True).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
