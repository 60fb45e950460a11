"""The state of a working copy: what is known about each file since both sides last agreed."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from pipeline.storage.atomic import write_text
from pipeline.storage.remote_stat import stat_from_info

STATE_FILE = ".mirror.json"


@dataclass(frozen=True)
class FileRecord:
    """State of a file when the working copy and the address agreed.

    Attributes:
        version: Numbers of `stat_from_info`, without times if the service states a version.
        sha256: Hash of its bytes in hex.
        local: Size, modification time in nanoseconds, and inode of the local file.
    """

    version: tuple[int, ...]
    sha256: str
    local: tuple[int, ...]


class MirrorState:
    """The records of a working copy, in its file `.mirror.json`. Several processes may use it."""

    def __init__(self, folder: Path) -> None:
        """Open nothing."""
        self._file = folder / STATE_FILE

    @property
    def copy_id(self) -> str:
        """Random id of the working copy, written when it is first used."""
        state = self._read()
        if "id" not in state:
            self.save({})
            state = self._read()
        return str(state["id"])

    def records(self) -> dict[str, FileRecord]:
        """Return the records by name."""
        files: dict[str, dict[str, Any]] = self._read().get("files", {})
        return {
            name: FileRecord(tuple(record["version"]), record["sha256"], tuple(record["local"]))
            for name, record in files.items()
        }

    def save(self, changes: Mapping[str, FileRecord | None]) -> None:
        """Store the records of files; None removes one.

        Raises:
            OSError: The file cannot be written.
        """
        if not changes and self._file.is_file():
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self._file.with_suffix(".lock"), fallback_to_soft=False):
            state = self._read()
            files: dict[str, Any] = state.get("files", {})
            for name, record in changes.items():
                files.pop(name, None)
                if record is not None:
                    files[name] = asdict(record)
            state = {"id": state.get("id") or uuid.uuid4().hex, "files": files}
            write_text(self._file, json.dumps(state) + "\n")

    def _read(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}


def remote_version(info: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the version of a file at the address, for `FileRecord`."""
    size, time_ns, changed_ns, version = stat_from_info(info)
    return (size, 0, 0, version) if version else (size, time_ns, changed_ns, 0)


def local_stat(path: Path) -> tuple[int, ...]:
    """Return the stat of a local file, for `FileRecord`."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def file_sha256(path: Path) -> str:
    """Return the hash of a local file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
