"""Content-addressed store on a local disk: one immutable safetensors file per key.

    <root>/<kind>/<first two digits of key>/<key>.safetensors

An entry is written under a temporary name, synced, and linked to its final name, which only one of several
writers can do. So a reader sees the complete entry or none, an entry never changes, and no lock is needed.
`entry_format` defines the bytes of an entry.
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
from pipeline.storage.os_errors import entry_disk_full_error, is_disk_full

__all__ = ["KINDS", "EntrySpec", "EntryStat", "EntryState", "Kind", "Store", "TensorSpec"]

SUFFIX = ".safetensors"
"""Suffix of an entry's file."""

DISPLACED_SUFFIX = ".displaced"
"""Suffix of a folder that was found at an entry's path; it is renamed, never deleted."""

NO_STAT = (0, 0, 0, 0)
"""Row of `Store.stats` for a key without a file."""

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


@dataclass(frozen=True)
class EntryStat:
    """Stat of an entry's file; while it is unchanged, the content is taken to be unchanged too."""

    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(frozen=True)
class EntryState:
    """Result of `Store.check`.

    Attributes:
        status: "valid", "missing" or "wrong".
        reason: Defect of a wrong entry, without its path; empty otherwise.
        stat: Stat of the file; None if there is no regular file.
        metadata: Metadata of a valid entry that was read; None if its stat was trusted.
        shapes: Shapes of the tensors of such an entry, by name.
    """

    status: Literal["valid", "missing", "wrong"]
    reason: str = ""
    stat: EntryStat | None = None
    metadata: dict[str, Any] | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None

    @property
    def valid(self) -> bool:
        """Whether the entry can be used."""
        return self.status == "valid"


class Store:
    """Entries below one folder, shared by any number of recipes, projects and processes.

    Attributes:
        address: Address of the folder.
        root: Path of the folder, to which the paths of entries belong.
        threads: Number of entries to check or write at the same time.
        readers: Number of threads that keep up with training. One on a local disk, because several threads
            wait for the interpreter more than for the disk.
        fix: Suggested fix if an entry cannot be read or written.
    """

    threads: ClassVar[int] = os.cpu_count() or 1
    readers: ClassVar[int] = 1
    fix: ClassVar[str] = (
        "make sure that cache_dir is on a working disk and that this user may read and write it"
    )

    def __init__(self, root: Path) -> None:
        """Use the store at `root`; the folder is created by the first write."""
        self.root = root
        self.address: Address = root

    def path(self, spec: EntrySpec) -> Path:
        """Return the path of the entry, whether or not it exists."""
        # A format string takes a fifth of the time of joining paths.
        return Path(f"{self.root}/{spec.kind}/{spec.key[:2]}/{spec.key}{SUFFIX}")

    def where(self, spec: EntrySpec) -> str:
        """Return the location of the entry for messages."""
        return self._shown(self.path(spec))

    def check(self, spec: EntrySpec, trusted: EntryStat | None = None) -> EntryState:
        """Check whether the entry exists and satisfies its specification.

        A file whose stat equals `trusted` is not read. Any other file is read and verified: size, header,
        key, shapes, dtypes, checksum, and finite values.

        Raises:
            StoreError: The file or its folder cannot be read.
        """
        path = self.path(spec)
        try:
            stat = self._stat(path)
            if trusted is not None and stat == trusted and spec.may_have(stat.num_bytes):
                return EntryState("valid", stat=stat)

            raw, stat = self._read_with_stat(path)
            arrays, metadata = parse(spec, raw, verify=True)
        except FileNotFoundError:
            return EntryState("missing")
        except WrongEntryError as err:
            return EntryState("wrong", str(err), self._stat_or_none(path))
        except OSError as err:
            raise self._access_error(path, err, "read") from err

        shapes = {name: array.shape for name, array in arrays.items()}
        return EntryState("valid", stat=stat, metadata=metadata, shapes=shapes)

    def stats(self, kind: Kind, keys: Iterable[str]) -> npt.NDArray[np.int64]:
        """Return the `EntryStat` of many entries as int64 (N, 4), in the order of `keys`.

        A row is `NO_STAT` if the key has no regular file. Files are not opened.
        """
        root = f"{self.root}/{kind}/"
        values = array("q")
        for key in keys:
            try:
                stat = os.stat(f"{root}{key[:2]}/{key}{SUFFIX}")  # noqa: PTH116 - a Path costs more than the call
            except OSError:
                values.extend(NO_STAT)
                continue
            regular = stat_module.S_ISREG(stat.st_mode)
            row = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
            values.extend(row if regular else NO_STAT)
        return np.frombuffer(values, dtype=np.int64).reshape(-1, 4)

    def read_tensor_specs(self, spec: EntrySpec) -> dict[str, TensorSpec] | None:
        """Return the shapes and dtypes in an entry's header, unverified; None without a readable header."""
        try:
            return stated_tensors(self._header(self.path(spec)))
        except (OSError, WrongEntryError):
            return None

    def read_metadata(self, kind: Kind, key: str) -> dict[str, Any] | None:
        """Return the metadata in an entry's header, unverified; None without a readable header."""
        try:
            return stated_metadata(self._header(self.path(EntrySpec(kind, key, {}))))
        except (OSError, WrongEntryError):
            return None

    def read(self, spec: EntrySpec) -> dict[str, Array]:
        """Read an entry's tensors as read-only arrays; bfloat16 as its bits, in uint16.

        Every call checks size, header, key, shapes and dtypes. Only `check` computes the checksum.

        Raises:
            StoreError: The entry is missing or does not match `spec`.
        """
        path = self.path(spec)
        try:
            arrays, _ = parse(spec, self._read(path), verify=False)
        except WrongEntryError as err:
            raise StoreError(
                f"a cache entry is damaged: {err}",
                where=self._shown(path),
                fix="start the cache job again: it replaces the entry",
            ) from err
        except OSError as err:
            raise self._access_error(path, err, "read") from err
        return arrays

    def write(self, spec: EntrySpec, tensors: Mapping[str, Array], metadata: Mapping[str, Any]) -> bool:
        """Write an entry unless a valid one exists: the first valid entry wins.

        A wrong entry is replaced. A folder at the entry's path is renamed.

        Args:
            spec: Specification of the entry.
            tensors: Finite arrays of the specified shapes and dtypes; bfloat16 as uint16 bits.
            metadata: JSON-serialisable values that depend on nothing but the key.

        Returns:
            True if this call's entry is in place, False if a valid one existed.

        Raises:
            StoreError: The disk is full, or the path cannot be written.
            ValueError: The tensors do not match `spec`, or the header is too long.
        """
        raw = serialise(spec, tensors, metadata)
        path = self.path(spec)
        try:
            return self._place(spec, path, raw)
        except OSError as err:
            if is_disk_full(err):
                raise entry_disk_full_error(len(raw), self._shown(path)) from err
            raise self._access_error(path, err, "written") from err

    def remove(self, spec: EntrySpec) -> None:
        """Delete an entry's file if it exists; a folder at its path stays.

        Raises:
            StoreError: The file cannot be deleted.
        """
        path = self.path(spec)
        try:
            self._stat(path)
            self._delete(path)
        except (FileNotFoundError, WrongEntryError):
            return
        except OSError as err:
            raise self._access_error(path, err, "deleted") from err

    def _access_error(self, path: Path, err: OSError, action: str) -> StoreError:
        missing = isinstance(err, FileNotFoundError) and action == "read"
        return StoreError(
            f"a cache entry cannot be {action}: {err.strerror or err}",
            where=self._shown(path),
            fix="start the cache job again: it encodes missing entries" if missing else self.fix,
        )

    def _header(self, path: Path) -> dict[str, Any]:
        self._stat(path)
        return read_header(self._read_start(path))

    def _stat_or_none(self, path: Path) -> EntryStat | None:
        try:
            return self._stat(path)
        except (OSError, WrongEntryError):
            return None

    # Only the methods below access files; `pipeline.cache.remote_store` overrides them.

    def _shown(self, path: Path) -> str:
        """Return a path for messages."""
        return str(path)

    def _stat(self, path: Path) -> EntryStat:
        """Return the stat of a regular file.

        Raises:
            FileNotFoundError: The path does not exist.
            WrongEntryError: The path is not a regular file.
        """
        return _regular_stat(path.stat())

    def _read_with_stat(self, path: Path) -> tuple[bytes, EntryStat]:
        """Read a file, and return its stat from before; raises as `_stat`."""
        return _read_file(path)

    def _read(self, path: Path) -> bytes:
        """Read a file; raises as `_stat`."""
        return _read_file(path)[0]

    def _delete(self, path: Path) -> None:
        """Delete a file."""
        path.unlink()

    def _read_start(self, path: Path) -> bytes:
        """Read a file's first `DATA_START` bytes, or all if it has fewer."""
        with path.open("rb") as file:
            return file.read(DATA_START)

    def _place(self, spec: EntrySpec, path: Path, raw: bytes) -> bool:
        """Write the bytes of an entry, as `write`."""
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
                self._clear_path(spec, path)
            return True
        finally:
            with suppress(FileNotFoundError):
                temp.unlink()

    def _clear_path(self, spec: EntrySpec, path: Path) -> None:
        """Remove a wrong entry from its path.

        Another process may replace it with a valid entry between the check and the rename. So the renamed
        file is verified once more, and restored if it is valid.
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
            parse(spec, _read_file(aside)[0], verify=True)
        except (WrongEntryError, OSError):
            aside.unlink()
            return
        _link(aside, path)
        with suppress(FileNotFoundError):
            aside.unlink()


def _read_file(path: Path) -> tuple[bytes, EntryStat]:
    """Return the content of a regular file and its stat, taken before reading.

    Uses system calls directly: a Python file object makes eight of them instead of four, and threads that
    read many small entries wait for each other at every call.

    Raises:
        WrongEntryError: The path is not a regular file.
        OSError: The file does not exist or cannot be read.
    """
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        stat = _regular_stat(os.fstat(descriptor))
        data = os.read(descriptor, stat.num_bytes + 1)
        while len(data) < stat.num_bytes and (more := os.read(descriptor, stat.num_bytes + 1)):
            data += more  # one call returns at most 2 GiB, and less after a signal
        return data, stat
    finally:
        os.close(descriptor)


def _regular_stat(stat: os.stat_result) -> EntryStat:
    if not stat_module.S_ISREG(stat.st_mode):
        kind = "a folder" if stat_module.S_ISDIR(stat.st_mode) else "a special file"
        raise WrongEntryError(f"its path must be a regular file, got {kind}")
    return EntryStat(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def _link(temp: Path, path: Path) -> bool:
    """Link `temp` to `path`; return False if `path` exists.

    On a file system without hard links, rename instead. Two writers may then rename at the same moment, and
    the later entry remains; both are valid.
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
