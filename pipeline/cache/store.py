"""Content-addressed store on a local disk: one immutable safetensors file per key.

    <root>/<kind>/<first two digits of key>/<key>.safetensors
    <root>/packs/<kind>/                                        packs of entries, see `pack_format`

An entry is written under a temporary name, synced, and linked to its final name, which only one of several
writers can do. So a reader sees the complete entry or none, an entry never changes, and no lock is needed.
`entry_format` defines the bytes of an entry. An entry without a file of its own may be in a pack.
"""

from __future__ import annotations

import os
import stat as stat_module
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pipeline.cache.entry_files import link, read_file, regular_stat
from pipeline.cache.entry_format import (
    DATA_START,
    KINDS,
    Array,
    EntrySpec,
    Kind,
    TensorSpec,
    WrongEntryError,
    damaged_error,
    parse,
    read_header,
    serialise,
    stated_metadata,
    stated_tensors,
)
from pipeline.cache.entry_state import NO_STAT, EntryStat, EntryState
from pipeline.cache.folder import LocalCacheFolder
from pipeline.cache.pack_format import pack_folder
from pipeline.cache.pack_index import NO_DIGEST, digests_of
from pipeline.cache.packed_entries import PackedEntries
from pipeline.errors import StoreError
from pipeline.storage.addresses import Address
from pipeline.storage.atomic import temp_path_for
from pipeline.storage.os_errors import entry_disk_full_error, is_disk_full

__all__ = ["KINDS", "NO_STAT", "EntrySpec", "EntryStat", "EntryState", "Kind", "Store", "TensorSpec"]

SUFFIX = ".safetensors"
"""Suffix of an entry's file."""

DISPLACED_SUFFIX = ".displaced"
"""Suffix of a folder that was found at an entry's path; it is renamed, never deleted."""


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

    @cached_property
    def packed(self) -> PackedEntries:
        """Entries in packs."""
        return PackedEntries(LocalCacheFolder(self.root))

    def path(self, spec: EntrySpec) -> Path:
        """Return the path of the entry's own file, whether or not it exists."""
        # A format string takes a fifth of the time of joining paths.
        return Path(f"{self.root}/{spec.kind}/{spec.key[:2]}/{spec.key}{SUFFIX}")

    def where(self, spec: EntrySpec) -> str:
        """Return the location of the entry's own file for messages."""
        return self._shown(self.path(spec))

    def check(self, spec: EntrySpec, trusted: EntryStat | None = None) -> EntryState:
        """Check whether the entry exists and satisfies its specification.

        A file whose stat equals `trusted` is not read. Any other file is read and verified: size, header,
        key, shapes, dtypes, checksum, and finite values. An entry in a pack counts only if it has no file of
        its own.

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
            return self._check_packed(spec, trusted)
        except WrongEntryError as err:
            return EntryState("wrong", str(err), self._stat_or_none(path))
        except OSError as err:
            raise self._access_error(path, err, "read") from err

        shapes = {name: array.shape for name, array in arrays.items()}
        return EntryState("valid", stat=stat, metadata=metadata, shapes=shapes)

    def stats(self, kind: Kind, keys: Iterable[str]) -> npt.NDArray[np.int64]:
        """Return the `EntryStat` of many entries as int64 (N, 4), in the order of `keys`.

        A row is `NO_STAT` if the key has no regular file and is in no pack. Files are not opened.

        Raises:
            StoreError: The packs cannot be read.
        """
        root = f"{self.root}/{kind}/"
        values = array("q")
        unfound = bytearray()
        for key in keys:
            try:
                stat = os.stat(f"{root}{key[:2]}/{key}{SUFFIX}")  # noqa: PTH116 - a Path costs more than the call
            except OSError:
                values.extend(NO_STAT)
                unfound += digests_of((key,))
                continue
            regular = stat_module.S_ISREG(stat.st_mode)
            row = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
            values.extend(row if regular else NO_STAT)
            if not regular:
                unfound += NO_DIGEST
        return self._with_packed(kind, np.frombuffer(values, dtype=np.int64).reshape(-1, 4), unfound)

    def read_tensor_specs(self, spec: EntrySpec) -> dict[str, TensorSpec] | None:
        """Return the shapes and dtypes in an entry's header, unverified; None without a readable header."""
        try:
            return stated_tensors(self._header(spec))
        except (OSError, WrongEntryError):
            return None

    def read_metadata(self, kind: Kind, key: str) -> dict[str, Any] | None:
        """Return the metadata in an entry's header, unverified; None without a readable header."""
        try:
            return stated_metadata(self._header(EntrySpec(kind, key, {})))
        except (OSError, WrongEntryError):
            return None

    def read(self, spec: EntrySpec) -> dict[str, Array]:
        """Read an entry's tensors as read-only arrays; bfloat16 as its bits, in uint16.

        Every call checks size, header, key, shapes and dtypes. The checksum is computed by `check`, and for
        entries in packs.

        Raises:
            StoreError: The entry is missing or does not match `spec`.
        """
        path = self.path(spec)
        try:
            raw = self._read(path)
        except FileNotFoundError as err:
            return self._read_packed(spec, err)
        except WrongEntryError as err:
            raise damaged_error(self._shown(path), err) from err
        except OSError as err:
            raise self._access_error(path, err, "read") from err

        try:
            return parse(spec, raw, verify=False)[0]
        except WrongEntryError as err:
            raise damaged_error(self._shown(path), err) from err

    def read_verified(self, spec: EntrySpec) -> bytes:
        """Return the bytes of an entry's own file after verifying them completely.

        Raises:
            WrongEntryError: The file is missing or wrong.
            StoreError: The file cannot be read.
        """
        path = self.path(spec)
        try:
            raw = self._read(path)
        except FileNotFoundError as err:
            raise WrongEntryError("the entry is missing") from err
        except OSError as err:
            raise self._access_error(path, err, "read") from err
        parse(spec, raw, verify=True)
        return raw

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
        """Delete an entry's own file if it exists; a folder stays, and so does the entry in packs.

        Raises:
            StoreError: The file cannot be deleted.
        """
        path = self.path(spec)
        try:
            with suppress(FileNotFoundError, WrongEntryError):
                self._stat(path)
                self._delete(path)
        except OSError as err:
            raise self._access_error(path, err, "deleted") from err

    def remove_packed(self, specs: Sequence[EntrySpec]) -> None:
        """Remove entries from the indexes of all packs.

        Raises:
            StoreError: An index cannot be read or replaced.
        """
        try:
            self.packed.remove(specs)
        except OSError as err:
            raise self._packs_error(specs[0].kind, err, "changed") from err

    def _access_error(self, path: Path, err: OSError, action: str) -> StoreError:
        missing = isinstance(err, FileNotFoundError) and action == "read"
        return StoreError(
            f"a cache entry cannot be {action}: {err.strerror or err}",
            where=self._shown(path),
            fix="start the cache job again: it encodes missing entries" if missing else self.fix,
        )

    def _header(self, spec: EntrySpec) -> dict[str, Any]:
        path = self.path(spec)
        try:
            self._stat(path)
            return read_header(self._read_start(path))
        except FileNotFoundError:
            header = self.packed.header(spec)
            if header is None:
                raise
            return header

    def _check_packed(self, spec: EntrySpec, trusted: EntryStat | None) -> EntryState:
        try:
            return self.packed.check(spec, trusted)
        except OSError as err:
            raise self._packs_error(spec.kind, err) from err

    def _read_packed(self, spec: EntrySpec, missing: FileNotFoundError) -> dict[str, Array]:
        """Read an entry without a file of its own, as `read`; `missing` is the error of reading the file."""
        try:
            arrays = self.packed.read(spec)
        except WrongEntryError as err:
            raise damaged_error(self.packed.where(spec), err) from err
        except OSError as err:
            raise self._packs_error(spec.kind, err) from err
        if arrays is None:
            raise self._access_error(self.path(spec), missing, "read") from missing
        return arrays

    def _with_packed(
        self, kind: Kind, stats: npt.NDArray[np.int64], unfound: bytearray
    ) -> npt.NDArray[np.int64]:
        """Return stats with the rows of packed entries; `unfound` has a digest for each row `NO_STAT`."""
        if not unfound:
            return stats
        try:
            packed = self.packed.stats(kind, unfound)
        except OSError as err:
            raise self._packs_error(kind, err) from err
        if packed.any():
            stats = stats.copy()
            stats[(stats == NO_STAT).all(axis=1)] = packed
        return stats

    def _packs_error(self, kind: Kind, err: OSError, action: str = "read") -> StoreError:
        return StoreError(
            f"the packs of the cache cannot be {action}: {err.strerror or err}",
            where=self.packed.folder.where(pack_folder(kind)),
            fix=self.fix,
        )

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
        return regular_stat(path.stat())

    def _read_with_stat(self, path: Path) -> tuple[bytes, EntryStat]:
        """Read a file, and return its stat from before; raises as `_stat`."""
        return read_file(path)

    def _read(self, path: Path) -> bytes:
        """Read a file; raises as `_stat`."""
        return read_file(path)[0]

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

            while not link(temp, path):
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
            parse(spec, read_file(aside)[0], verify=True)
        except (WrongEntryError, OSError):
            aside.unlink()
            return
        link(aside, path)
        with suppress(FileNotFoundError):
            aside.unlink()
