"""The log of a pod while it runs, complete although connections to the API server are lost."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from launchers.kubernetes_client import POLL_S, KubernetesClient


class FollowedLog:
    """The log of a pod, read by a thread until the pod ends; a lost connection is opened again."""

    def __init__(self, kubernetes: KubernetesClient, pod: str) -> None:
        """Start to read."""
        self._kubernetes, self._pod = kubernetes, pod
        self._lines = queue.SimpleQueue[str]()
        self._last_stamp = ""
        self._last_line_s: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name=f"log-of-{pod}", daemon=True)
        self._thread.start()

    def new_lines(self) -> Iterator[str]:
        """Yield the lines that were read since the last call."""
        while not self._lines.empty():
            yield self._lines.get()

    def finish(self, timeout_s: float) -> None:
        """Read the rest of the log of a pod that has ended, for at most `timeout_s`."""
        self._stopped.set()
        self._thread.join(timeout_s)

    def _read(self) -> None:
        while True:
            is_last = self._stopped.is_set()
            with suppress(ApiException, HTTPError, OSError):
                self._read_new(follow=not is_last)
            if is_last:
                return
            self._stopped.wait(POLL_S)

    def _read_new(self, *, follow: bool) -> None:
        """Read the lines after the last one; a minute more is requested, because lines are delayed."""
        last_line_s = self._last_line_s
        since_s = None if last_line_s is None else round(time.monotonic() - last_line_s) + 60

        # Two lines may have the same time, so lines are compared with the end of the last connection only.
        previous = self._last_stamp
        for stamp, line in self._kubernetes.log_lines(self._pod, follow=follow, since_s=since_s):
            if stamp > previous:
                self._lines.put(line)
                self._last_stamp, self._last_line_s = stamp, time.monotonic()
