"""The content-addressed store of tensors: one immutable safetensors file for each key.

An entry lies at `root/<kind>/<key[:2]>/<key>.safetensors`; `entry_format` says what is in it.
An entry appears whole and is never changed: it is written under a temporary name, made durable, and linked to
its name, which only one of several writers can do. Nothing here relies on a lock.
"""

from __future__ import annotations

import errno
import os
import stat as stat_module
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from pipeline.cache.entry_format import (
    DATA_START,
    KINDS,
    Array,
    EntrySpec,
    Kind,
    TensorSpec,
    WrongEntryError,
    parse,
    read_header,
    serialise,
    stated_metadata,
    stated_tensors,
)
from pipeline.errors import StoreError
from pipeline.storage.addresses import Address
from pipeline.storage.atomic import temp_path_for

__all__ = ["KINDS", "EntrySpec", "EntryStat", "EntryState", "Kind", "Store", "TensorSpec"]

SUFFIX = ".safetensors"
DISPLACED_SUFFIX = ".displaced"
"""Of a folder that stood in an entry's place: it is moved aside, never deleted."""

NO_STAT = (0, 0, 0, 0)
"""In `Store.stats`, of what is no file."""

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class EntryStat:
    """What the file system says of an entry's file; as long as it stays the same, so does the content."""

    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(frozen=True)
class EntryState:
    """What `Store.check` found.

    Attributes:
        status: "valid", "missing" or "wrong".
        reason: Of "wrong": one sentence without the path; empty otherwise.
        stat: Of the file that was looked at; None when missing, or when the place holds no file.
        metadata: Of an entry that was read whole and is valid; None when its stat was trusted.
        shapes: Of the tensors of such an entry, by name.
    """

    status: Literal["valid", "missing", "wrong"]
    reason: str = ""
    stat: EntryStat | None = None
    metadata: dict[str, Any] | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None

    @property
    def valid(self) -> bool:
        """True where the entry can be used."""
        return self.status == "valid"


class Store:
    """Entries below one folder, which any number of recipes, projects and processes may share.

    Attributes:
        address: Of the folder.
        root: The folder; entries' paths are below it.
        threads: How many entries may well be looked at or written at a time.
        readers: How many threads keep up with training. Of a disk one: several wait for their turn at the
            interpreter more than for the disk.
        fix: What to do where an entry may not be read or written.
    """

    threads: ClassVar[int] = os.cpu_count() or 1
    readers: ClassVar[int] = 1
    fix: ClassVar[str] = "see that cache_dir lies on a working disk and may be read and written by this user"

    def __init__(self, root: Path) -> None:
        """Nothing is read or made yet."""
        self.root = root
        self.address: Address = root

    def path(self, spec: EntrySpec) -> Path:
        """Where the entry lies, whether or not it is there."""
        return Path(
            f"{self.root}/{spec.kind}/{spec.key[:2]}/{spec.key}{SUFFIX}"
        )  # five times faster than joins

    def where(self, spec: EntrySpec) -> str:
        """The entry's place as messages name it."""
        return self._shown(self.path(spec))

    def check(self, spec: EntrySpec, trusted: EntryStat | None = None) -> EntryState:
        """Whether the entry is there and right.

        A file whose stat equals `trusted` is taken for what it was when that was recorded. Any other is read
        whole: size, header, shapes, dtypes, key, checksum, and every value finite.

        Raises:
            StoreError: The file or its folder may not be read.
        """
        path = self.path(spec)
        try:
            state = self._stat(path)
            if trusted is not None and state == trusted and spec.may_have(state.num_bytes):
                return EntryState("valid", stat=state)
            raw, state = self._whole(path)
            arrays, metadata = parse(spec, raw, verify=True)
        except FileNotFoundError:
            return EntryState("missing")
        except WrongEntryError as wrong:
            return EntryState("wrong", str(wrong), self._stat_or_none(path))
        except OSError as err:
            raise self._refused(path, err, "read") from err
        shapes = {name: array.shape for name, array in arrays.items()}
        return EntryState("valid", stat=state, metadata=metadata, shapes=shapes)

    def stats(self, kind: Kind, keys: Iterable[str]) -> npt.NDArray[np.int64]:
        """Bytes, mtime_ns, ctime_ns and inode of each key's file, int64 (N, 4); 0 where there is no file.

        Nothing is read. As `EntryStat`, for many entries at once.
        """
        root = f"{self.root}/{kind}/"
        found = array("q")
        for key in keys:
            try:
                stat = os.stat(f"{root}{key[:2]}/{key}{SUFFIX}")  # noqa: PTH116 - a Path costs more than the call
            except OSError:
                found.extend(NO_STAT)
                continue
            regular = stat_module.S_ISREG(stat.st_mode)
            each = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
            found.extend(each if regular else NO_STAT)
        return np.frombuffer(found, dtype=np.int64).reshape(-1, 4)

    def read_tensor_specs(self, spec: EntrySpec) -> dict[str, TensorSpec] | None:
        """The shapes and dtypes in the header of the file in the entry's place; no data is read.

        None when there is no file, or it has no header that makes sense.
        """
        try:
            return stated_tensors(self._header(self.path(spec)))
        except (OSError, WrongEntryError):
            return None

    def read_metadata(self, kind: Kind, key: str) -> dict[str, Any] | None:
        """What the header of an entry says that it was made of, unchecked; no data is read.

        None when there is no file, or it has no header that makes sense.
        """
        try:
            return stated_metadata(self._header(self.path(EntrySpec(kind, key, {}))))
        except (OSError, WrongEntryError):
            return None

    def read(self, spec: EntrySpec) -> dict[str, Array]:
        """The entry's tensors as read-only arrays; bfloat16 as its bits, in uint16.

        Size, header, key, shapes and dtypes are checked on every call; the checksum is `check`'s affair.

        Raises:
            StoreError: The entry is missing, or not what `spec` says.
        """
        path = self.path(spec)
        try:
            arrays, _ = parse(spec, self._bytes(path), verify=False)
        except WrongEntryError as wrong:
            raise _entry_error(self._shown(path), str(wrong)) from wrong
        except OSError as err:
            raise self._refused(path, err, "read") from err
        return arrays

    def write(self, spec: EntrySpec, tensors: Mapping[str, Array], metadata: Mapping[str, Any]) -> bool:
        """Put the entry in its place, unless a valid one is there: the first valid entry wins.

        What is in its place and not valid is replaced; a folder there is moved aside.

        Args:
            spec: What the entry must be.
            tensors: Arrays of the specified shapes and dtypes, bfloat16 as uint16 bits; every value finite.
            metadata: JSON-serialisable and the same whenever and wherever the entry is made.

        Returns:
            True if this call's entry is the one in place, False if a valid one was there first.

        Raises:
            StoreError: The disk is full, or the place cannot be written.
            ValueError: The tensors are not what `spec` says, or the header does not fit.
        """
        raw = serialise(spec, tensors, metadata)
        path = self.path(spec)
        try:
            return self._place(spec, path, raw)
        except OSError as err:
            if err.errno in _DISK_FULL:
                raise StoreError(
                    f"the disk is full: an entry of {len(raw)} bytes cannot be written",
                    where=self._shown(path),
                    fix="free some space there or set cache_dir to another disk, and start again: what is in "
                    "the cache stays valid",
                ) from err
            raise self._refused(path, err, "written") from err

    def remove(self, spec: EntrySpec) -> None:
        """Delete the file in an entry's place, if there is one; a folder there stays.

        Raises:
            StoreError: It cannot be deleted.
        """
        path = self.path(spec)
        try:
            self._stat(path)
            self._delete(path)
        except (FileNotFoundError, WrongEntryError):
            return
        except OSError as err:
            raise self._refused(path, err, "deleted") from err

    def _refused(self, path: Path, err: OSError, done: str) -> StoreError:
        missing = isinstance(err, FileNotFoundError) and done == "read"
        fix = "start the cache job again: it makes what is missing" if missing else self.fix
        what = f"a cache entry cannot be {done}: {err.strerror or err}"
        return StoreError(what, where=self._shown(path), fix=fix)

    def _header(self, path: Path) -> dict[str, Any]:
        self._stat(path)
        return read_header(self._start(path))

    def _stat_or_none(self, path: Path) -> EntryStat | None:
        try:
            return self._stat(path)
        except (OSError, WrongEntryError):
            return None

    # What follows is all that touches files: `pipeline.cache.remote_store` has its own.

    def _shown(self, path: Path) -> str:
        """A path as messages name it."""
        return str(path)

    def _stat(self, path: Path) -> EntryStat:
        """Of a regular file.

        Raises:
            FileNotFoundError: There is nothing.
            WrongEntryError: Something else is there.
        """
        return _regular_stat(path)

    def _whole(self, path: Path) -> tuple[bytes, EntryStat]:
        """A file's bytes, and its stat before they were read; raises as `_stat`."""
        return _read_whole(path)

    def _bytes(self, path: Path) -> bytes:
        """As the first of `_whole`."""
        return _read_whole(path)[0]

    def _delete(self, path: Path) -> None:
        """Delete a file."""
        path.unlink()

    def _start(self, path: Path) -> bytes:
        """A file's first `DATA_START` bytes, or all if it has fewer."""
        with path.open("rb") as file:
            return file.read(DATA_START)

    def _place(self, spec: EntrySpec, path: Path, raw: bytes) -> bool:
        """As `write`, of the entry's bytes."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = temp_path_for(path)
        try:
            with temp.open("xb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            while not _link(temp, path):
                if self.check(spec).valid:
                    return False
                self._take_away(spec, path)
            return True
        finally:
            with suppress(FileNotFoundError):
                temp.unlink()

    def _take_away(self, spec: EntrySpec, path: Path) -> None:
        """Free the place of a wrong entry.

        Between looking and moving, another process may have put a valid entry there: what was moved is looked
        at again, and put back if it is good.
        """
        aside = temp_path_for(path)
        try:
            path.rename(aside)
        except FileNotFoundError:
            return
        if aside.is_dir() and not aside.is_symlink():
            aside.rename(aside.with_name(f"{path.stem}{aside.stem}{DISPLACED_SUFFIX}"))
            return
        try:
            parse(spec, _read_whole(aside)[0], verify=True)
        except (WrongEntryError, OSError):
            aside.unlink()
            return
        _link(aside, path)
        with suppress(FileNotFoundError):
            aside.unlink()


def _read_whole(path: Path) -> tuple[bytes, EntryStat]:
    """The file's bytes, and its stat before they were read.

    With four system calls, each of which lets another thread go first: a Python file makes twice as many.
    """
    # Without waiting: opening a pipe would last until somebody writes into it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        state = _regular(os.fstat(descriptor))
        data = os.read(descriptor, state.num_bytes + 1)
        while len(data) < state.num_bytes and (more := os.read(descriptor, state.num_bytes + 1)):
            data += more  # a read ends early at a signal, or after 2 GiB
        return data, state
    finally:
        os.close(descriptor)


def _regular_stat(path: Path) -> EntryStat:
    return _regular(path.stat())


def _regular(found: os.stat_result) -> EntryStat:
    if not stat_module.S_ISREG(found.st_mode):
        kind = "a folder" if stat_module.S_ISDIR(found.st_mode) else "something that is no file"
        raise WrongEntryError(f"{kind} is in its place")
    return _entry_stat(found)


def _entry_stat(found: os.stat_result) -> EntryStat:
    return EntryStat(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _link(temp: Path, path: Path) -> bool:
    """Give `temp`'s file the name `path` too; False when something has that name.

    Where the file system knows no links, a rename does it. Two writers at the same moment then both rename,
    and the later entry stands: both are valid.
    """
    try:
        os.link(temp, path)
    except FileExistsError:
        return False
    except OSError as err:
        if err.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):
            return False
        temp.replace(path)
    return True


def _entry_error(where: str, reason: str) -> StoreError:
    fix = "start the cache job again: it replaces the entry"
    return StoreError(f"a cache entry is damaged: {reason}", where=where, fix=fix)
