"""Records which files are synced before they get their names, for tests of durability."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


class DiskCalls:
    """Calls of `os.fsync`, and of the functions that give a file its final name.

    A file that is renamed before it is synced may be empty after a power failure.

    Attributes:
        names: Final names, in order.
        unsynced: Final names that were given before the complete file or folder was synced.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Record the calls until the end of the test."""
        self.names: list[str] = []
        self.unsynced: list[str] = []
        self._synced_bytes: dict[int, int] = {}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._record_sync)
        for name in ("rename", "replace", "link"):
            monkeypatch.setattr(os, name, self._naming(getattr(os, name)))

    def is_synced(self, path: Path) -> bool:
        """Return whether this file was synced under any name, or this folder since its last new name.

        A file counts only if it was as large as it is now. Otherwise a part was still in a buffer.
        """
        stat = path.stat()
        num_bytes = self._synced_bytes.get(stat.st_ino)
        return num_bytes is not None and (path.is_dir() or num_bytes == stat.st_size)

    def _record_sync(self, descriptor: int) -> None:
        stat = os.fstat(descriptor)
        self._synced_bytes[stat.st_ino] = stat.st_size
        self._fsync(descriptor)

    def _naming(self, function: Any) -> Any:
        def record(source: Any, target: Any, **options: Any) -> None:
            path = Path(source)
            files = list(path.rglob("*")) if path.is_dir() else [path]
            is_synced = all(map(self.is_synced, files))
            function(source, target, **options)
            self._synced_bytes.pop(Path(target).parent.stat().st_ino, None)
            self.names.append(Path(target).name)
            self.unsynced += [] if is_synced else [Path(target).name]

        return record
