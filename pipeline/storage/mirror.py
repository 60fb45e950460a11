"""A working copy of a folder at an address: files are pulled before they are read, and pushed after a change.

    <working copy>/.mirror.json    version at the address, SHA-256 and local stat of each file, of a time when
                                   both sides agreed

Files are transferred completely or not at all. A file that is unchanged on both sides is neither pulled nor
pushed. If both sides changed, the address wins: its version has been visible to other machines. A file that
could not be pushed stays in the working copy, and the next push sends it.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from pipeline.errors import StoreError
from pipeline.escaping import without_secrets
from pipeline.storage.addresses import Address, Url
from pipeline.storage.atomic import temp_path_for, write_text
from pipeline.storage.mirrored_files import (
    FileRecord,
    folders_of,
    has_wildcards,
    in_order,
    is_mirrored,
    matches,
    rank_of,
)
from pipeline.storage.remote_folder import ACCESS_FIX, FileChangedError, RemoteFolder
from pipeline.storage.remote_stat import stat_from_info

STATE_FILE = ".mirror.json"

_THREADS = 8

Log = Callable[[str], object]


def discard(_line: str) -> None:
    """Ignore a line of a log."""


def allow() -> None:
    """Allow every change of the address."""


class Mirror:
    """Pulls and pushes files between an address and its working copy; for a local folder it does nothing.

    Files are selected by patterns such as `tables/*`. An asterisk also matches slashes, and a pattern with an
    exclamation mark in front excludes files. Hidden files are never transferred.
    """

    def __init__(
        self,
        address: Address,
        folder: Path,
        *,
        log: Log = discard,
        before_use: Callable[[], object] = lambda: None,
    ) -> None:
        """Open nothing.

        Args:
            address: Address of the files.
            folder: Working copy; `address` itself if that is a local path.
            log: Receives a line if a request is repeated.
            before_use: Called once before anything is read or written at the address.
        """
        self.address = address
        self.folder = folder
        self._log = log
        self._before_use = before_use
        self._present: set[str] = set()

    @property
    def is_remote(self) -> bool:
        """Whether the files are at an address."""
        return isinstance(self.address, Url)

    @cached_property
    def remote(self) -> RemoteFolder:
        """Files at the address.

        Raises:
            StoreError: A package is missing, or the address cannot be opened.
        """
        self._before_use()
        return RemoteFolder(Url(str(self.address)), key="output_dir", log=self._log)

    @property
    def copy_id(self) -> str:
        """Random id of the working copy, written when it is first used."""
        state = self._read_state()
        if "id" not in state:
            self._save({})
            state = self._read_state()
        return str(state["id"])

    def names(self, *patterns: str) -> list[str]:
        """Return the sorted names of the files at the address; none for a local folder.

        Raises:
            StoreError: The service does not answer.
        """
        return sorted(self.infos(*patterns))

    def infos(self, *patterns: str) -> dict[str, dict[str, Any]]:
        """Return the file system's information about the files at the address, by name.

        Raises:
            StoreError: The service does not answer.
        """
        return self._listed(patterns) if self.is_remote else {}

    def pull(self, *patterns: str) -> list[str]:
        """Make local files equal to those at the address, and return the names of those that changed.

        Local files that do not exist at the address stay.

        Raises:
            StoreError: The service does not answer, or a file cannot be read.
            OSError: A local file cannot be written.
        """
        if not self.is_remote:
            return []
        listed = self._listed(patterns)
        records = self._records()
        wanted = [name for name, info in listed.items() if not self._is_current(name, info, records)]
        pulled: dict[str, FileRecord | None] = {}
        try:
            for names in in_order(wanted):
                with ThreadPoolExecutor(_THREADS, thread_name_prefix="pull") as pool:
                    pulls = pool.map(lambda name: self._pull_file(name, listed[name]), names)
                    pulled |= {name: record for name, record in zip(names, pulls, strict=True) if record}
        finally:
            self._save(pulled)
        self._present |= {name for name in listed if (self.folder / name).is_file()}
        return sorted(pulled)

    def push(self, *patterns: str, guard: Callable[[], object] = allow) -> list[str]:
        """Replace files at the address by the local ones that changed, and return their names.

        Files that this object has pulled or pushed, and that have been deleted since, are deleted at the
        address after all others have been transferred.

        Args:
            patterns: Patterns of the files.
            guard: Called before each change of the address. An exception ends the push.

        Raises:
            StoreError: The service does not answer, or a file cannot be written.
            OSError: A local file cannot be read.
        """
        if not self.is_remote:
            return []

        # Determined before the files are listed: a file is deleted only after its successor exists.
        deleted = [name for name in self._present if matches(name, patterns) and not self._exists(name)]
        records = self._records()
        changed = self._changed(patterns, records)
        self._announce_change(changed, records, guard)
        pushed: dict[str, FileRecord | None] = {}
        try:
            for names in in_order(changed):
                with ThreadPoolExecutor(_THREADS, thread_name_prefix="push") as pool:
                    pushes = pool.map(
                        lambda name: self._push_file(
                            name, changed[name], is_new=name not in records, guard=guard
                        ),
                        names,
                    )
                    pushed |= {name: record for name, record in zip(names, pushes, strict=True) if record}
            self._present |= set(pushed)
        finally:
            self._save(pushed)
        self.remove(*deleted, guard=guard)
        return sorted(pushed)

    def delete_unpushed(self, *patterns: str) -> list[str]:
        """Delete local files that have not been pushed, and return their names; the next pull reads them.

        Raises:
            OSError: A local file cannot be read or deleted.
        """
        if not self.is_remote:
            return []
        changed = sorted(self._changed(patterns, self._records()))
        for name in changed:
            (self.folder / name).unlink(missing_ok=True)
        self._present -= set(changed)
        return changed

    def remove(self, *names: str, guard: Callable[[], object] = allow) -> None:
        """Delete files at the address, those of `LAST` first; missing ones are ignored.

        Args:
            names: Names of the files.
            guard: Called before each deletion. An exception ends the work.

        Raises:
            StoreError: The service does not answer, or a file cannot be deleted.
        """
        for group in reversed(list(in_order(names)) if self.is_remote else []):
            for name in group:
                guard()
                with suppress(FileNotFoundError):
                    self._request(partial(self.remote.remove, name), name, "deleted")
        self._present -= set(names)
        if names and self.is_remote:
            self._save(dict.fromkeys(names))

    def where(self, name: str = "") -> str:
        """Return the location of a file at the address, for messages."""
        return f"{without_secrets(str(self.address)).rstrip('/')}/{name}"

    def error(self, what: str, name: str = "") -> StoreError:
        """Return the error for a request about `name` that failed for good."""
        fix = f"{ACCESS_FIX}; nothing is lost: the files are in {self.folder}, and the next command for this "
        return StoreError(what, where=self.where(name), fix=f"{fix}recipe on this machine uploads them")

    def _listed(self, patterns: Sequence[str]) -> dict[str, dict[str, Any]]:
        listed = self._request(self.remote.list_files, "", "listed")
        return {
            name: info
            for name, info in sorted(listed.items())
            if is_mirrored(name) and matches(name, patterns)
        }

    def _is_current(self, name: str, info: Mapping[str, Any], records: Mapping[str, FileRecord]) -> bool:
        record = records.get(name)
        return record is not None and record.version == _version(info) and self._exists(name)

    def _exists(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def _pull_file(self, name: str, info: Mapping[str, Any]) -> FileRecord | None:
        """Download a file, and return its record; None if it has been deleted since it was listed."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = temp_path_for(path)
        try:
            self._request(partial(self.remote.download, name, temp), name, "read")
            sha256 = _sha256(temp)
            if not (path.is_file() and _sha256(path) == sha256):
                # Several commands choose the newest run or checkpoint by its time.
                time_ns = stat_from_info(info)[1] or temp.stat().st_mtime_ns
                os.utime(temp, ns=(time_ns, time_ns))
                temp.replace(path)
        except FileNotFoundError:
            return None
        finally:
            temp.unlink(missing_ok=True)
        # A newer version than the listed one may have been read: then the next pull reads it again.
        return FileRecord(_version(info), sha256, _local_stat(path))

    def _changed(
        self, patterns: Sequence[str], records: Mapping[str, FileRecord]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the hash and stat of each local file that differs from its record, by name."""
        changed: dict[str, tuple[str, tuple[int, ...]]] = {}
        touched: dict[str, FileRecord | None] = {}
        for name in self._local_names(patterns):
            path, record = self.folder / name, records.get(name)
            with suppress(FileNotFoundError):  # pruned since it was listed
                stat = _local_stat(path)
                if record is None or record.local != stat:
                    sha256 = _sha256(path)
                    if record is None or record.sha256 != sha256:
                        changed[name] = sha256, stat
                    else:
                        touched[name] = FileRecord(record.version, sha256, stat)
        self._save(touched)
        return changed

    def _announce_change(
        self, changed: Iterable[str], records: Mapping[str, FileRecord], guard: Callable[[], object]
    ) -> None:
        """Delete the markers that are about to be replaced, because the files next to them change first."""
        self.remove(*(name for name in changed if rank_of(name) and name in records), guard=guard)

    def _push_file(
        self, name: str, state: tuple[str, tuple[int, ...]], *, is_new: bool, guard: Callable[[], object]
    ) -> FileRecord | None:
        """Upload a file, and return its record; None if it has been deleted since it was listed.

        Where the answer to the upload does not state the version, it is read after the upload. A version that
        another machine wrote in between then counts as this one, and is not pulled before its next change.
        """
        path = self.folder / name
        guard()
        try:
            version = self._request(partial(self._upload, name, is_new, guard), name, "written")
            if version:
                info: dict[str, Any] = {"size": state[1][0], "ETag": version}
            else:
                info = self._request(partial(self.remote.info, name), name, "read")
        except FileNotFoundError as err:
            if path.is_file():
                raise self.error(f"the output folder cannot be written: {err}", name) from err
            return None
        return FileRecord(_version(info), *state)

    def _upload(self, name: str, is_new: bool, guard: Callable[[], object]) -> str:
        """Upload a file, and return its version if the answer states it.

        A guarded upload may take so long that another machine writes a new file before it ends. That is
        checked at its end.
        """
        path = self.folder / name
        try:
            return self.remote.upload(path, name, create=is_new and guard is not allow)
        except FileChangedError:
            guard()
            return self.remote.upload(path, name)

    def _local_names(self, patterns: Sequence[str]) -> Iterator[str]:
        """Yield the names of the local files that match, from the folders in which they can be."""
        for start in folders_of(patterns):
            for folder, subfolders, names in os.walk(self.folder / start):
                subfolders.sort()
                top = Path(folder).relative_to(self.folder)
                for name in sorted(names):
                    relative = (top / name).as_posix()
                    if is_mirrored(relative) and matches(relative, patterns):
                        yield relative
        for name in patterns:
            if not has_wildcards(name) and matches(name, patterns) and self._exists(name):
                yield name

    def _request(self, request: Callable[[], Any], name: str, done: str) -> Any:
        """Return the result of a request.

        Raises:
            FileNotFoundError: The file does not exist.
            StoreError: The request failed for good.
        """
        try:
            return request()
        except FileNotFoundError:
            raise
        except OSError as err:
            raise self.error(f"the output folder cannot be {done}: {err}", name) from err

    def _read_state(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / STATE_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}

    def _records(self) -> dict[str, FileRecord]:
        files: dict[str, dict[str, Any]] = self._read_state().get("files", {})
        return {
            name: FileRecord(tuple(record["version"]), record["sha256"], tuple(record["local"]))
            for name, record in files.items()
        }

    def _save(self, changes: Mapping[str, FileRecord | None]) -> None:
        """Store the records of files; None removes one. Other processes may use the same working copy."""
        path = self.folder / STATE_FILE
        if not changes and path.is_file():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock"), fallback_to_soft=False):
            state = self._read_state()
            files: dict[str, Any] = state.get("files", {})
            for name, record in changes.items():
                files.pop(name, None)
                if record is not None:
                    files[name] = asdict(record)
            state = {"id": state.get("id") or uuid.uuid4().hex, "files": files}
            write_text(path, json.dumps(state) + "\n")


def _version(info: Mapping[str, Any]) -> tuple[int, ...]:
    size, time_ns, changed_ns, version = stat_from_info(info)
    return (size, 0, 0, version) if version else (size, time_ns, changed_ns, 0)


def _local_stat(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
