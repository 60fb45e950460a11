"""A lease at an address: one process at a time holds it, and a dead holder does not block it.

The lease is a small file. Its holder replaces it every `HEARTBEAT_S` seconds. Another process that sees the
same version for `STALE_S` seconds takes it over.

    {"machine": ..., "owner": id of the local folder, "token": random, "beat": 12, "time": ..., "doing": ...}

The file is created only if it does not exist, and replaced only if it still has the version that was read.
Services without such conditional writes are refused.
"""

from __future__ import annotations

import json
import platform
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pipeline.background import in_background
from pipeline.log import Log, discard
from pipeline.outputs.folder import OutputFolder
from pipeline.storage.remote_folder import FileChangedError, NoConditionalWritesError, RemoteFolder

HEARTBEAT_S = 15.0
STALE_S = 60.0

_POLL_S = 2.0

TRAINING = "training this run"
DELETING = "deleting this run"


@dataclass(frozen=True)
class Clock:
    """Time in seconds from any start, and a wait of some seconds, for a process that waits for a lease."""

    now: Callable[[], float] = time.monotonic
    wait: Callable[[float], object] = time.sleep


class Lease:
    """The file of a lease.

    `lost` is set as soon as another process has taken the lease over.
    """

    def __init__(
        self,
        folder: RemoteFolder,
        name: str,
        *,
        owner: str,
        log: Log = discard,
        doing: str = TRAINING,
        clock: Clock = Clock(),
    ) -> None:
        """Read and write nothing.

        Args:
            folder: Folder of the lease.
            name: Name of its file.
            owner: Id of the caller's local folder. A lease with the same id is left from a dead process,
                because a process also holds a lock in its local folder.
            log: Receives progress lines.
            doing: What the caller does while it holds the lease, for messages on other machines.
            clock: Clock of `acquire`.
        """
        self.lost = False
        self._folder = folder
        self._name = name
        self._owner = owner
        self._log = log
        self._doing = doing
        self._clock = clock
        self._token = uuid.uuid4().hex
        self._beat = 0
        self._version = ""

    def acquire(self) -> None:
        """Wait until this process holds the lease.

        Raises:
            NoConditionalWritesError: The service has no conditional writes.
            OSError: The service does not answer.
        """
        seen, seen_at_s = "", 0.0
        while not self.acquire_at_once():
            version, current = self.read()
            if current is None:
                continue  # released since
            # Only this process measures the time: clocks of different machines are never compared.
            now_s = self._clock.now()
            if version != seen:
                if not seen:
                    self._log(f"{holder_text(current)}; waiting until it finishes or stops")
                seen, seen_at_s = version, now_s
            elif now_s - seen_at_s >= STALE_S and self.acquire_at_once(dead_version=version):
                return
            self._clock.wait(_POLL_S)

    def acquire_at_once(self, *, dead_version: str = "") -> bool:
        """Return whether this process holds the lease now, without waiting for another holder.

        `dead_version` is a version of the file that was not replaced for so long that its holder is dead.
        Raises as `acquire`.
        """
        if self._create():
            return True
        version, current = self.read()
        if current is None:
            return False
        is_dead = current.get("owner") == self._owner or version == dead_version
        return is_dead and self._replace(version)

    def read(self) -> tuple[str, dict[str, Any] | None]:
        """Return the version of the file, and its content, which may be newer than the version.

        The content is None if the file does not exist, and an empty mapping if it is not a lease.
        """
        version = ""
        try:
            # The version first: if the file is replaced in between, a take-over of the old version fails.
            version = self._folder.version(self._name)

            return version, dict(json.loads(self._folder.read(self._name)))
        except FileNotFoundError:
            return "", None
        except (ValueError, TypeError):
            # A file that is not a lease has no owner, and becomes stale like a lease.
            return version, {}

    def keep(self, stop: threading.Event) -> None:
        """Replace the file every `HEARTBEAT_S` seconds until `stop` is set or the lease is lost."""
        while not self.lost and not stop.wait(HEARTBEAT_S):
            # An outage is not an error: the next beat shows whether another process used it to take over.
            with suppress(OSError):
                self.beat()

    def beat(self) -> None:
        """Replace the file, to show that its holder lives; raises OSError if the service does not answer."""
        if not self.is_held():
            return
        self._beat += 1
        try:
            self._version = self._folder.put(self._name, self._content(), expected=self._version)
        except FileChangedError:
            self.is_held()  # unless the answer to this put was lost, and it was repeated

    def is_held(self) -> bool:
        """Read the file, and return whether this process still holds the lease; if not, it is lost."""
        if self.lost:
            return False
        version, current = self.read()
        if current is not None and current.get("token") == self._token:
            self._version = version
            return True

        # A missing file is a lost lease too, because a later holder may have released it.
        self.lost = True
        self._log(f"another machine took over while this one was {self._doing}; nothing more is uploaded")
        return False

    def release(self) -> None:
        """Delete the file if this process holds the lease; a service that is away lets it become stale."""
        with suppress(OSError):
            if self.is_held():
                self._folder.remove(self._name)

    def _create(self) -> bool:
        if not self._folder.put_if_absent(self._name, self._content()):
            return False
        # A service that does not know the condition may ignore it instead of refusing it.
        if self._folder.put_if_absent(self._name, self._content()):
            self._folder.remove(self._name)
            raise NoConditionalWritesError("the service ignores the conditions of writes")
        return True

    def _replace(self, version: str) -> bool:
        try:
            self._version = self._folder.put(self._name, self._content(), expected=version)
        except FileChangedError:
            # The answer to this put may have been lost, and it was repeated.
            _, current = self.read()
            return current is not None and current.get("token") == self._token
        return True

    def _content(self) -> bytes:
        content = {
            "machine": platform.node(),
            "owner": self._owner,
            "token": self._token,
            "beat": self._beat,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "doing": self._doing,
        }
        return json.dumps(content).encode("utf-8")


def holder_text(content: Mapping[str, Any]) -> str:
    """Return which machine holds a lease, and for what."""
    return f"{content.get('machine', 'another machine')} is {content.get('doing', 'using it')}"


def lease_at(outputs: OutputFolder, name: str, *, log: Log = discard, doing: str = TRAINING) -> Lease:
    """Return the lease `name` of an output folder at an address.

    Raises:
        StoreError: The address cannot be opened.
    """
    # A second connection, because a heartbeat must not wait for a large upload.
    return Lease(outputs.connect(), name, owner=outputs.owner, log=log, doing=doing)


@contextmanager
def hold_lease(outputs: OutputFolder, name: str, log: Log, *, doing: str = TRAINING) -> Generator[Lease]:
    """Hold the lease `name` of an output folder at an address for the body, after waiting for its holder.

    Raises:
        StoreError: The service does not answer, or has no conditional writes.
    """
    lease = lease_at(outputs, name, log=log, doing=doing)
    try:
        lease.acquire()
    except NoConditionalWritesError as err:
        fix = "set output_dir to a folder, or to an address of a service with conditional writes, such as S3"
        raise outputs.error(f"output_dir cannot be used: {err}", name, fix=fix) from err
    except OSError as err:
        raise outputs.error(f"the output folder cannot be used: {err}", name) from err
    with kept(lease):
        yield lease


@contextmanager
def kept(lease: Lease) -> Generator[None]:
    """Renew a lease that this process already holds during the body, and release it at the end."""
    try:
        with in_background(lease.keep, name="lease"):
            yield
    finally:
        lease.release()


def still_held(lease: Lease, outputs: OutputFolder, name: str) -> bool:
    """Read a lease before a change of the address, and return whether this process holds it.

    Raises:
        StoreError: The service does not answer.
    """
    try:
        return lease.is_held()
    except OSError as err:
        raise outputs.error(f"the output folder cannot be read: {err}", name) from err
