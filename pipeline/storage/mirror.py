"""A working copy of a folder at an address: files are pulled before they are read, and pushed after a change.

    <working copy>/.mirror.json    version at the address, SHA-256 and local stat of each file, of a time when
                                   both sides agreed

Files are transferred completely or not at all. A file that is unchanged on both sides is neither pulled nor
pushed. If both sides changed, the address wins: its version has been visible to other machines. A file that
could not be pushed stays in the working copy, and the next push sends it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.errors import StoreError
from pipeline.escaping import without_secrets
from pipeline.storage.addresses import Address, Url
from pipeline.storage.atomic import sync_file, temp_path_for
from pipeline.storage.mirror_state import FileRecord, MirrorState, file_sha256, local_stat, remote_version
from pipeline.storage.mirrored_files import (
    in_order,
    is_mirrored,
    local_names,
    matches,
    rank_of,
)
from pipeline.storage.os_errors import is_disk_full
from pipeline.storage.remote_folder import ACCESS_FIX, FileChangedError, RemoteFolder
from pipeline.storage.remote_stat import stat_from_info

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
        self._state = MirrorState(folder)
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
        return self._state.copy_id

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

        A file that was deleted at the address is deleted here too, unless it changed here since both sides
        agreed. Files that were never there stay.

        Raises:
            StoreError: The service does not answer, or a file cannot be read.
            OSError: A local file cannot be written or deleted.
        """
        if not self.is_remote:
            return []
        # Read before the files are listed: one that another process pushes meanwhile is not a deleted one.
        records = self._state.records()
        everything = self._listed(("*",))
        deleted = self._delete_missing(patterns, records, everything)
        listed = {name: info for name, info in everything.items() if matches(name, patterns)}
        wanted = [name for name, info in listed.items() if not self._is_current(name, info, records)]
        pulled: dict[str, FileRecord | None] = {}
        try:
            for names in in_order(wanted):
                with ThreadPoolExecutor(_THREADS, thread_name_prefix="pull") as pool:
                    pulls = pool.map(lambda name: self._pull_file(name, listed[name]), names)
                    pulled |= {name: record for name, record in zip(names, pulls, strict=True) if record}
        finally:
            self._state.save(pulled)
        self._present |= {name for name in listed if (self.folder / name).is_file()}
        return sorted({*pulled, *deleted})

    def delete_missing(self, *patterns: str) -> None:
        """Delete local files that were deleted at the address, as `pull` does, and pull nothing.

        Raises:
            StoreError: The service does not answer.
            OSError: A local file cannot be deleted.
        """
        if self.is_remote:
            self._delete_missing(patterns, self._state.records(), self._listed(("*",)))

    def push(self, *patterns: str, guard: Callable[[], object] = allow) -> list[str]:
        """Replace files at the address by the local ones that changed, and return their names.

        Files that this object has pulled or pushed, and that have been deleted since, are deleted at the
        address after all others have been transferred. `delete_unpushed` and the deletions of `pull` do not
        count.

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
        records = self._state.records()
        deleted = [
            name
            for name in self._present & records.keys()
            if matches(name, patterns) and not self._exists(name)
        ]
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
            self._state.save(pushed)
        self.remove(*deleted, guard=guard)
        return sorted(pushed)

    def delete_unpushed(self, *patterns: str) -> list[str]:
        """Delete local files that have not been pushed, and return their names; the next pull reads them.

        Raises:
            OSError: A local file cannot be read or deleted.
        """
        if not self.is_remote:
            return []
        changed = sorted(self._changed(patterns, self._state.records()))
        try:
            for name in changed:
                (self.folder / name).unlink(missing_ok=True)
        finally:
            # Without records, no mirror of this working copy takes them for files to delete at the address.
            self._state.save(dict.fromkeys(changed))
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
        if not (names and self.is_remote):
            return
        removed: set[str] = set()
        try:
            for name in chain.from_iterable(reversed(list(in_order(names)))):
                guard()
                with suppress(FileNotFoundError):
                    self._request(partial(self.remote.remove, name), name, "deleted")
                removed.add(name)
        finally:
            self._present -= removed
            self._state.save(dict.fromkeys(removed))

    def where(self, name: str = "") -> str:
        """Return the location of a file at the address, for messages."""
        return f"{without_secrets(str(self.address)).rstrip('/')}/{name}"

    def error(self, what: str, name: str = "", *, is_upload: bool = False) -> StoreError:
        """Return the error for a request about `name` that failed for good."""
        fix = "then start the command again"
        if is_upload:
            fix = f"nothing is lost: the files are in {self.folder}, and the next command for this recipe on "
            fix += "this machine uploads them"
        return StoreError(what, where=self.where(name), fix=f"{ACCESS_FIX}; {fix}")

    def _listed(self, patterns: Sequence[str]) -> dict[str, dict[str, Any]]:
        listed = self._request(self.remote.list_files, "", "listed")
        return {
            name: info
            for name, info in sorted(listed.items())
            if is_mirrored(name) and matches(name, patterns)
        }

    def _delete_missing(
        self, patterns: Sequence[str], records: Mapping[str, FileRecord], everything: Mapping[str, object]
    ) -> list[str]:
        """Forget the records of files that are not at the address; delete and return those unchanged here.

        An address without any file has been lost. Then nothing is deleted, and the next pushes fill it again.
        """
        if not everything:
            self._state.save(dict.fromkeys(records))
            return []

        missing = [name for name in records if name not in everything and matches(name, patterns)]
        deleted: list[str] = []
        for name in chain.from_iterable(reversed(list(in_order(missing)))):
            path = self.folder / name
            with suppress(FileNotFoundError):
                if local_stat(path) == records[name].local:
                    path.unlink()
                    deleted.append(name)
        self._present -= set(missing)
        self._state.save(dict.fromkeys(missing))
        return deleted

    def _is_current(self, name: str, info: Mapping[str, Any], records: Mapping[str, FileRecord]) -> bool:
        record = records.get(name)
        return record is not None and record.version == remote_version(info) and self._exists(name)

    def _exists(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def _pull_file(self, name: str, info: Mapping[str, Any]) -> FileRecord | None:
        """Download a file, and return its record; None if it has been deleted since it was listed."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = temp_path_for(path)
        try:
            self._request(partial(self.remote.download, name, temp), name, "read")
            sha256 = file_sha256(temp)
            if not (path.is_file() and file_sha256(path) == sha256):
                # Several commands choose the newest run or checkpoint by its time.
                time_ns = stat_from_info(info)[1] or temp.stat().st_mtime_ns
                os.utime(temp, ns=(time_ns, time_ns))
                # Otherwise, the file may be empty after a crash, although its record exists.
                sync_file(temp)
                temp.replace(path)
        except FileNotFoundError:
            return None
        finally:
            temp.unlink(missing_ok=True)
        # A newer version than the listed one may have been read: then the next pull reads it again.
        return FileRecord(remote_version(info), sha256, local_stat(path))

    def _changed(
        self, patterns: Sequence[str], records: Mapping[str, FileRecord]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the hash and stat of each local file that differs from its record, by name."""
        changed: dict[str, tuple[str, tuple[int, ...]]] = {}
        touched: dict[str, FileRecord | None] = {}
        for name in local_names(self.folder, patterns):
            path, record = self.folder / name, records.get(name)
            with suppress(FileNotFoundError):  # pruned since it was listed
                stat = local_stat(path)
                if record is None or record.local != stat:
                    sha256 = file_sha256(path)
                    if record is None or record.sha256 != sha256:
                        changed[name] = sha256, stat
                    else:
                        touched[name] = FileRecord(record.version, sha256, stat)
        self._state.save(touched)
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
                what = f"the output folder cannot be written: {err}"
                raise self.error(what, name, is_upload=True) from err
            return None
        return FileRecord(remote_version(info), *state)

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

    def _request(self, request: Callable[[], Any], name: str, done: str) -> Any:
        """Return the result of a request.

        Raises:
            FileNotFoundError: The file does not exist.
            StoreError: The request failed for good.
            OSError: The local disk is full or cannot be written.
        """
        try:
            return request()
        except FileNotFoundError:
            raise
        except OSError as err:
            is_local = is_disk_full(err) or err.errno == errno.EROFS
            if done == "read" and is_local and err.errno is not None:
                raise OSError(err.errno, os.strerror(err.errno), str(self.folder / name)) from err
            what = f"the output folder cannot be {done}: {err}"
            raise self.error(what, name, is_upload=done == "written") from err
