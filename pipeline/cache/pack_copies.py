"""Copies of a remote cache's packs on a local disk, for training.

A pack is copied in the background after one of its entries has been read. Readers verify each entry, and
discard a copy that differs from the remote pack.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from queue import Queue

from filelock import FileLock

from pipeline.cache.packs import PACK_SUFFIX
from pipeline.errors import StoreError
from pipeline.storage.atomic import is_temp_name, sync_file, temp_path_for

# A training uses each of its packs many times per epoch, so its packs do not displace each other.
IDLE_S = 600.0
"""Time since its last use from which a copy may make room for another one."""

_USE_INTERVAL_S = 60.0
"""Shortest time between two records of a copy's use."""

_MIN_FREE_FRACTION = 0.1
"""Fraction of the disk that copies leave free."""

Download = Callable[[str, Path], object]
"""Writes the pack of a path relative to the cache to a local file."""


@dataclass(frozen=True)
class CopySettings:
    """Folder of the copies, created with the first one, and their maximum size in all; 0 disables copying."""

    folder: Path
    max_bytes: int


class PackCopies:
    """Copies of packs in one folder; it can be used from several threads and processes."""

    def __init__(self, settings: CopySettings, download: Download) -> None:
        """Use the folder in `settings`; `download` writes a pack to a local file."""
        self._folder = settings.folder
        self._max_bytes = settings.max_bytes
        self._download = download
        self._queue: Queue[tuple[str, int]] = Queue()
        self._wanted: set[str] = set()
        self._discarded: set[str] = set()
        self._last_use_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def read(self, name: str, start: int, end: int) -> bytes | None:
        """Return bytes of a copied pack; None if there is no readable copy, or if copying is disabled."""
        if not self._max_bytes:
            return None
        path = self._path(name)
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                data = os.pread(descriptor, end - start, start)
            finally:
                os.close(descriptor)
        except OSError:
            return None

        now_s = time.monotonic()
        if now_s - self._last_use_s.get(name, -_USE_INTERVAL_S) >= _USE_INTERVAL_S:
            self._last_use_s[name] = now_s

            # The modification time is the last use for all processes that share the folder.
            with suppress(OSError):
                os.utime(path)
        return data

    def want(self, name: str, num_bytes: int) -> None:
        """Copy a pack in the background if there is room, and if this process has not tried it before."""
        if num_bytes > self._max_bytes:
            return
        # In the background: until the copy exists, training reads the remote pack and never waits.
        with self._lock:
            if name in self._wanted:
                return
            self._wanted.add(name)
            self._queue.put((name, num_bytes))
            if self._thread is None:
                # A daemon thread ends with the process. The next one deletes an unfinished copy.
                self._thread = threading.Thread(target=self._work, name="latentline-copies", daemon=True)
                self._thread.start()

    def discard(self, name: str) -> None:
        """Delete a copy that differs from its pack; the next `want` copies it again, once per process."""
        with suppress(OSError):
            self._path(name).unlink()
        with self._lock:
            if name not in self._discarded:
                self._discarded.add(name)
                self._wanted.discard(name)

    def wait(self) -> None:
        """Wait until all wanted packs were tried."""
        self._queue.join()

    def _work(self) -> None:
        while True:
            name, num_bytes = self._queue.get()
            # Without a copy, entries are read from the remote pack, and errors are raised there.
            with suppress(OSError, StoreError):
                self._copy(name, num_bytes)
            self._queue.task_done()

    def _copy(self, name: str, num_bytes: int) -> None:
        path = self._path(name)
        self._folder.mkdir(parents=True, exist_ok=True)
        # All processes of a machine share the folder, and each pack is downloaded by one of them. A copy is
        # never outdated, because packs never change. A soft lock would outlive a process that is killed.
        with FileLock(self._folder / "lock", fallback_to_soft=False):
            if path.exists() or not self._make_room(num_bytes):
                return
            temp = temp_path_for(path)
            try:
                self._download(name, temp)
                if temp.stat().st_size == num_bytes:
                    sync_file(temp)
                    temp.replace(path)
            finally:
                with suppress(FileNotFoundError):
                    temp.unlink()

    def _make_room(self, num_bytes: int) -> bool:
        """Delete idle copies until another one fits; return whether it does. The caller holds the lock."""
        copies: list[tuple[float, int, Path]] = []
        for file in self._folder.iterdir():
            if is_temp_name(file.name):
                file.unlink()  # only the process with the lock writes
            elif file.suffix == PACK_SUFFIX:
                stat = file.stat()
                copies.append((stat.st_mtime, stat.st_size, file))

        used_bytes = sum(size for _, size, _ in copies)
        disk = shutil.disk_usage(self._folder)
        free_bytes = disk.free - _MIN_FREE_FRACTION * disk.total
        for last_use_s, size, file in sorted(copies):
            fits = used_bytes + num_bytes <= self._max_bytes and num_bytes <= free_bytes
            if fits or last_use_s > time.time() - IDLE_S:
                break
            file.unlink()
            used_bytes -= size
            free_bytes += size
        return used_bytes + num_bytes <= self._max_bytes and num_bytes <= free_bytes

    def _path(self, name: str) -> Path:
        return self._folder / PurePosixPath(name).name  # a hash, so equal names are equal packs
