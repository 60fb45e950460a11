"""A lease at an address: one process at a time holds it, and no holder can block others after its death.

The lease is a small file. Its holder replaces it every `HEARTBEAT_S` seconds. Another process that sees the
same content for `STALE_S` seconds takes it over; clocks of different machines are never compared.

    {"machine": ..., "copy": id of the working copy, "token": random, "beat": 12, "time": ...}

The file is created with a conditional put where the service has one. On other services, and for a takeover,
the process writes it, waits for `SETTLE_S` seconds, and holds the lease if its token is still there.
"""

from __future__ import annotations

import json
import platform
import threading
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from pipeline.storage.remote_folder import RemoteFolder

HEARTBEAT_S = 15.0
STALE_S = 60.0
SETTLE_S = 5.0

_POLL_S = 2.0

Log = Callable[[str], object]


class Lease:
    """The file of a lease.

    Attributes:
        lost: Whether another process has taken the lease over.
    """

    def __init__(self, folder: RemoteFolder, name: str, *, copy_id: str, log: Log) -> None:
        """Read and write nothing.

        Args:
            folder: Folder of the lease.
            name: Name of its file.
            copy_id: Id of the caller's working copy. A lease with the same id is left from a dead process,
                because a process also holds a local lock of its working copy.
            log: Receives progress lines.
        """
        self.lost = False
        self._folder = folder
        self._name = name
        self._copy_id = copy_id
        self._log = log
        self._token = uuid.uuid4().hex
        self._beat = 0

    def acquire(self) -> None:
        """Wait until this process holds the lease.

        Raises:
            OSError: The service does not answer.
        """
        seen: dict[str, Any] | None = None
        seen_at_s = 0.0
        while True:
            created = self._folder.put_if_absent(self._name, self._content())
            if created:
                return
            current = self.read()
            if current is None or current.get("copy") == self._copy_id:
                if self._take_over(settle_s=SETTLE_S if current is None else 0.0):
                    return
            elif current != seen:
                if seen is None:
                    machine = current.get("machine", "another machine")
                    self._log(f"{machine} is training this run; waiting until it finishes or stops")
                seen, seen_at_s = current, time.monotonic()
            elif time.monotonic() - seen_at_s >= STALE_S and self._take_over(settle_s=SETTLE_S):
                return
            time.sleep(_POLL_S)

    def read(self) -> dict[str, Any] | None:
        """Return the content of the file: None if it does not exist, an empty mapping if it is not a lease.

        Raises:
            OSError: The service does not answer.
        """
        try:
            return dict(json.loads(self._folder.read(self._name)))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            return {}

    def keep(self, stop: threading.Event) -> None:
        """Replace the file every `HEARTBEAT_S` seconds until `stop` is set or the lease is lost."""
        while not stop.wait(HEARTBEAT_S):
            # An outage is not an error: the next beat shows whether another process used it to take over.
            with suppress(OSError):
                if not self._is_held():
                    self.lost = True
                    self._log("another machine took over this run; nothing more is uploaded")
                    return
                self._beat += 1
                self._folder.put(self._name, self._content())

    def release(self) -> None:
        """Delete the file if this process holds the lease; a service that is away lets it become stale."""
        with suppress(OSError):
            if self._is_held():
                self._folder.remove(self._name)

    def _take_over(self, *, settle_s: float) -> bool:
        self._folder.put(self._name, self._content())
        time.sleep(settle_s)
        return self._is_held()

    def _is_held(self) -> bool:
        """Return whether the file is of this process; without one, a later holder may have released it."""
        current = self.read()
        return current is not None and current.get("token") == self._token

    def _content(self) -> bytes:
        content = {
            "machine": platform.node(),
            "copy": self._copy_id,
            "token": self._token,
            "beat": self._beat,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        return json.dumps(content).encode("utf-8")


@contextmanager
def hold_lease(lease: Lease) -> Generator[Lease]:
    """Hold a lease for the body; see `Lease.acquire`."""
    lease.acquire()
    stop = threading.Event()
    heartbeat = threading.Thread(target=lease.keep, args=(stop,), name="lease", daemon=True)
    heartbeat.start()
    try:
        yield lease
    finally:
        stop.set()
        heartbeat.join()
        lease.release()
