"""A process with everything below it: seen, stopped and waited for as one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

KILL_WAIT_S = 10.0
"""How long a killed process may take to vanish; one that hangs in the kernel (a GPU driver) takes longest."""

_POLL_S = 0.02


class ProcessTree:
    """The processes that a root process started, directly or not.

    A process whose parent died is no longer found below the root. So each look keeps what it has seen, and
    members of the root's own session count too (when the root was started in a session of its own). A process
    is known by its id and its start time: an id that the system has given to another process is never
    signalled.
    """

    def __init__(self, root: int) -> None:
        """Watch the process `root`, which may have ended already."""
        self._root = root
        self._seen: dict[psutil.Process, None] = {}
        self._own_session = _session(root) == root and root != os.getpid()

    def members(self) -> list[psutil.Process]:
        """All that live now, the root among them, parents before their children; zombies are not alive."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._root)
            self._keep([root, *root.children(recursive=True)])
        if self._own_session:
            self._keep(process for process in psutil.process_iter() if _session(process.pid) == self._root)
        for process in list(self._seen):
            with suppress(psutil.NoSuchProcess):
                self._keep(process.children(recursive=True))
        return [process for process in self._seen if _alive(process)]

    def stop(self, *, grace_s: float) -> list[psutil.Process]:
        """End every process: SIGTERM to each, `grace_s` seconds of patience, SIGKILL to those that are left.

        The tree is looked at before the first signal, because an orphaned child cannot be found afterwards.

        Returns:
            Those that had to be killed.
        """
        return self._stop(self.members(), grace_s)

    def stop_below(self, *, grace_s: float) -> list[psutil.Process]:
        """As `stop`, for all but the root."""
        return self._stop([process for process in self.members() if process.pid != self._root], grace_s)

    def _stop(self, targets: list[psutil.Process], grace_s: float) -> list[psutil.Process]:
        for process in targets:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _wait(targets, grace_s)
        spared = {self._root} - {process.pid for process in targets}
        left = [process for process in self.members() if process.pid not in spared]
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _wait(left, KILL_WAIT_S)
        return left

    def _keep(self, processes: Iterable[psutil.Process]) -> None:
        self._seen.update(dict.fromkeys(processes))


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait(processes: list[psutil.Process], timeout_s: float) -> None:
    # not psutil.wait_procs: it takes a child's exit status away from its Popen object, and waits for zombies
    # that only their parent can remove
    end_s = time.monotonic() + timeout_s
    while any(map(_alive, processes)) and time.monotonic() < end_s:
        time.sleep(_POLL_S)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
