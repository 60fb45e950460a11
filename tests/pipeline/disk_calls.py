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
        unsynced: Final names that were given before a sync of the file, or of all files in the folder.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Record the calls until the end of the test."""
        self.names: list[str] = []
        self.unsynced: list[str] = []
        self._synced: set[int] = set()
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._record_sync)
        for name in ("rename", "replace", "link"):
            monkeypatch.setattr(os, name, self._naming(getattr(os, name)))

    def is_synced(self, path: Path) -> bool:
        """Return whether this file was synced under any name, or this folder since its last new name."""
        return path.stat().st_ino in self._synced

    def _record_sync(self, descriptor: int) -> None:
        self._synced.add(os.fstat(descriptor).st_ino)
        self._fsync(descriptor)

    def _naming(self, function: Any) -> Any:
        def record(source: Any, target: Any, **options: Any) -> None:
            path = Path(source)
            files = list(path.rglob("*")) if path.is_dir() else [path]
            is_synced = all(map(self.is_synced, files))
            function(source, target, **options)
            self._synced.discard(Path(target).parent.stat().st_ino)
            self.names.append(Path(target).name)
            self.unsynced += [] if is_synced else [Path(target).name]

        return record
