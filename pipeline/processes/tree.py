"""A process and all its descendants, found, stopped and awaited together."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

KILL_WAIT_S = 10.0
"""Longest wait for a killed process to disappear; a process that hangs in a GPU driver takes longest."""

_POLL_S = 0.02


class ProcessTree:
    """The descendants of a root process, including the root, also after their parents have died.

    If the root was started in a new session, all processes of that session count as well.
    """

    def __init__(self, root: int) -> None:
        """Track the process with id `root`, which may have ended already."""
        self._root = root
        # psutil compares ids and start times, so an id that the system has reused is never signalled.
        self._seen: dict[psutil.Process, None] = {}
        self._own_session = _session(root) == root and root != os.getpid()

    def members(self) -> list[psutil.Process]:
        """Return all live processes, parents before their children. Zombies do not count as live."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._root)
            self._remember([root, *root.children(recursive=True)])
        # After the death of its parent, a process is not below the root any more. It is still in the root's
        # session, or was found by an earlier call.
        if self._own_session:
            self._remember(
                process for process in psutil.process_iter() if _session(process.pid) == self._root
            )
        for process in list(self._seen):
            with suppress(psutil.NoSuchProcess):
                self._remember(process.children(recursive=True))
        return [process for process in self._seen if _alive(process)]

    def stop(self, *, grace_s: float) -> list[psutil.Process]:
        """Send SIGTERM to every process, kill the ones that remain after `grace_s`, and return these."""
        return self._stop(self.members(), grace_s)

    def stop_below(self, *, grace_s: float) -> list[psutil.Process]:
        """Stop every process except the root, as `stop` does."""
        return self._stop([process for process in self.members() if process.pid != self._root], grace_s)

    def _stop(self, targets: list[psutil.Process], grace_s: float) -> list[psutil.Process]:
        # `targets` were collected before the first signal: an orphaned child cannot be found afterwards.
        for process in targets:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _wait(targets, grace_s)

        # A process may have started children while it was stopping.
        spared = {self._root} - {process.pid for process in targets}
        remaining = [process for process in self.members() if process.pid not in spared]
        for process in remaining:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _wait(remaining, KILL_WAIT_S)
        return remaining

    def _remember(self, processes: Iterable[psutil.Process]) -> None:
        self._seen.update(dict.fromkeys(processes))


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait(processes: list[psutil.Process], timeout_s: float) -> None:
    # psutil.wait_procs would take a child's exit status away from its Popen object, and would wait for
    # zombies, which only their parent can remove.
    end_s = time.monotonic() + timeout_s
    while any(map(_alive, processes)) and time.monotonic() < end_s:
        time.sleep(_POLL_S)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
