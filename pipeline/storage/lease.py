"""A lease at an address: one process at a time holds it, and no holder can block others after its death.

The lease is a small file. Its holder replaces it every `HEARTBEAT_S` seconds. Another process that sees the
same content for `STALE_S` seconds takes it over; clocks of different machines are never compared.

    {"machine": ..., "copy": id of the working copy, "token": random, "beat": 12, "time": ..., "doing": ...}

Where the service has conditional writes, the file is created if it does not exist, and replaced if it still
has the version that was read. On other services, a process could replace the file of another one. So after it
has created the file or taken it over, it waits for `SETTLE_S` seconds, and holds the lease if its token is
still there.
"""

from __future__ import annotations

import json
import platform
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from pipeline.storage.remote_folder import FileChangedError, RemoteFolder

HEARTBEAT_S = 15.0
STALE_S = 60.0
SETTLE_S = 5.0

_POLL_S = 2.0

TRAINING = "training this run"
DELETING = "deleting this run"

Log = Callable[[str], object]


class Lease:
    """The file of a lease.

    Attributes:
        lost: Whether another process has taken the lease over.
    """

    def __init__(
        self, folder: RemoteFolder, name: str, *, copy_id: str, log: Log, doing: str = TRAINING
    ) -> None:
        """Read and write nothing.

        Args:
            folder: Folder of the lease.
            name: Name of its file.
            copy_id: Id of the caller's working copy. A lease with the same id is left from a dead process,
                because a process also holds a local lock of its working copy.
            log: Receives progress lines.
            doing: What the caller does while it holds the lease, for messages on other machines.
        """
        self.lost = False
        self._folder = folder
        self._name = name
        self._copy_id = copy_id
        self._log = log
        self._doing = doing
        self._token = uuid.uuid4().hex
        self._beat = 0
        self._version = ""

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
            version, current = self._read_with_version()
            if current is None and created is False:
                pass  # released since: created next, because a put could replace the file of a new holder
            elif current is None or current.get("copy") == self._copy_id:
                if self._take_over(version, settle_s=SETTLE_S if current is None else 0.0):
                    return
            elif current != seen:
                if seen is None:
                    self._log(f"{holder_text(current)}; waiting until it finishes or stops")
                seen, seen_at_s = current, time.monotonic()
            elif time.monotonic() - seen_at_s >= STALE_S and self._take_over(version, settle_s=SETTLE_S):
                return
            time.sleep(_POLL_S)

    def acquire_at_once(self, *, stale: dict[str, Any] | None = None) -> bool:
        """Return whether this process holds the lease now, without waiting for another holder.

        Args:
            stale: Content of the file that has not changed for `STALE_S` seconds, so that its holder is dead.

        Raises:
            OSError: The service does not answer.
        """
        for _attempt in range(2):
            created = self._folder.put_if_absent(self._name, self._content())
            if created:
                return True
            version, current = self._read_with_version()
            if current is not None or created is None:
                break
        else:
            return False  # others hold and release it
        if current is None:
            return self._take_over(version, settle_s=SETTLE_S)
        if current.get("copy") == self._copy_id:
            return self._take_over(version, settle_s=0.0)
        return current == stale and self._take_over(version, settle_s=SETTLE_S)

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
                if not self.is_held():
                    return
                self._beat += 1
                try:
                    self._put(self._version)
                except FileChangedError:
                    self.is_held()  # unless the answer to this put was lost, and it was repeated

    def is_held(self) -> bool:
        """Read the file, and return whether this process still holds the lease; if not, it is lost.

        Without a file, a later holder may have released it.

        Raises:
            OSError: The service does not answer.
        """
        if self.lost:
            return False
        version, current = self._read_with_version()
        if current is not None and current.get("token") == self._token:
            self._version = version
            return True
        self.lost = True
        self._log(f"another machine took over while this one was {self._doing}; nothing more is uploaded")
        return False

    def release(self) -> None:
        """Delete the file if this process holds the lease; a service that is away lets it become stale."""
        with suppress(OSError):
            if self.is_held():
                self._folder.remove(self._name)

    def _take_over(self, version: str, *, settle_s: float) -> bool:
        """Replace the file if it has `version`, and return whether this process then holds the lease."""
        try:
            self._put(version)
        except FileChangedError:
            return False
        time.sleep(settle_s)
        current = self.read()
        return current is not None and current.get("token") == self._token

    def _put(self, version: str) -> None:
        self._version = self._folder.put(self._name, self._content(), expected=version)

    def _read_with_version(self) -> tuple[str, dict[str, Any] | None]:
        """Return the version of the file and its content, which may be newer than the version."""
        try:
            version = self._folder.version(self._name)
        except FileNotFoundError:
            version = ""
        return version, self.read()

    def _content(self) -> bytes:
        content = {
            "machine": platform.node(),
            "copy": self._copy_id,
            "token": self._token,
            "beat": self._beat,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "doing": self._doing,
        }
        return json.dumps(content).encode("utf-8")


def holder_text(content: Mapping[str, Any]) -> str:
    """Return which machine holds a lease and for what; those of earlier versions are of trainings."""
    return f"{content.get('machine', 'another machine')} is {content.get('doing', TRAINING)}"


@contextmanager
def hold_lease(lease: Lease) -> Generator[Lease]:
    """Hold a lease for the body; see `Lease.acquire`."""
    lease.acquire()
    with _kept(lease):
        yield lease


@contextmanager
def hold_free_lease(lease: Lease, *, stale: dict[str, Any] | None = None) -> Generator[bool]:
    """Hold a lease for the body if no other process holds it, and provide whether it is held.

    See `Lease.acquire_at_once`.
    """
    if not lease.acquire_at_once(stale=stale):
        yield False
        return
    with _kept(lease):
        yield True


@contextmanager
def _kept(lease: Lease) -> Generator[None]:
    """Keep a lease that this process holds for the body, and release it."""
    stop = threading.Event()
    heartbeat = threading.Thread(target=lease.keep, args=(stop,), name="lease", daemon=True)
    heartbeat.start()
    try:
        yield
    finally:
        stop.set()
        heartbeat.join()
        lease.release()
