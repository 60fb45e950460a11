"""Content-addressed store of cache entries: one immutable safetensors file per key, or a member of a pack.

A reader sees the complete entry or none, and an entry never changes, so no lock is needed. `entry_format`
defines the bytes of an entry, `folder` the files of a cache, and `packs` the files that hold many entries.
The single file of an entry precedes its copies in packs.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.cache.backends import cache_folder
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
from pipeline.cache.folder import NO_STAT, SUFFIX, NotAFileError, entry_name
from pipeline.cache.pack_copies import CopySettings, PackCopies
from pipeline.cache.packs import LIST_AGE_S, PackedEntry, PackIndex, digests_of, pack_folder
from pipeline.errors import StoreError
from pipeline.storage.addresses import Address
from pipeline.storage.os_errors import entry_disk_full_error, is_disk_full

__all__ = [
    "KINDS",
    "NO_STAT",
    "SUFFIX",
    "EntrySpec",
    "EntryStat",
    "EntryState",
    "Kind",
    "Store",
    "TensorSpec",
]


@dataclass(frozen=True)
class EntryStat:
    """Stat of an entry's file; while it is unchanged, the content is taken to be unchanged too.

    An entry in a pack has its own size, and the other values of the pack's file.
    """

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
        metadata: Metadata of a valid entry.
        shapes: Shapes of the tensors of a valid entry, by name.
        place_in_pack: Location of an entry in a pack, for messages; empty for a single file.
    """

    status: Literal["valid", "missing", "wrong"]
    reason: str = ""
    stat: EntryStat | None = None
    metadata: dict[str, Any] | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None
    place_in_pack: str = ""

    @property
    def valid(self) -> bool:
        """Whether the entry can be used."""
        return self.status == "valid"


class Store:
    """Entries of one cache, shared by any number of recipes, projects and processes.

    Attributes:
        packs: Lookup of packed entries by kind.
        threads: Number of entries to check or write at the same time.
        readers: Number of threads that keep up with training.
        copies: Local copies of packs that are read instead of remote ones; None without `CopySettings`.
    """

    def __init__(self, address: Address, *, copies: CopySettings | None = None) -> None:
        """Use the cache at `address`; nothing is read or created yet.

        Raises:
            StoreError: A package is missing, or the address cannot be opened.
        """
        self.address = address
        self.folder = cache_folder(address)
        self.packs: dict[Kind, PackIndex] = {kind: PackIndex(self.folder, kind) for kind in KINDS}
        self.threads, self.readers = self.folder.threads, self.folder.readers
        is_remote = self.folder.reads_packs_first
        self.copies = PackCopies(copies, self.folder.download) if copies and is_remote else None

    def path(self, spec: EntrySpec) -> Path:
        """Return the path of the entry's file in a cache on a disk, whether or not it exists."""
        return Path(str(self.address), entry_name(spec.kind, spec.key))

    def where(self, spec: EntrySpec) -> str:
        """Return the location of the entry's file for messages."""
        return self.folder.where(entry_name(spec.kind, spec.key))

    def check(self, spec: EntrySpec) -> EntryState:
        """Read and verify an entry: size, header, key, shapes, dtypes, checksum, and finite values.

        A packed entry counts only if it has no single file.

        Raises:
            StoreError: The file or its folder cannot be read.
        """
        name = entry_name(spec.kind, spec.key)
        try:
            raw, file_stat = self.folder.read_with_stat(name)
        except FileNotFoundError:
            return self._check_packed(spec) or EntryState("missing")
        except NotAFileError as err:
            return self._check_packed(spec) or EntryState("wrong", str(err))
        except OSError as err:
            raise self._access_error(name, err, "read") from err

        stat = EntryStat(*file_stat)
        try:
            return _verified(spec, raw, stat)
        except WrongEntryError as err:
            return EntryState("wrong", str(err), stat)

    def _check_packed(self, spec: EntrySpec) -> EntryState | None:
        def check(packed: PackedEntry) -> EntryState:
            return _verified(spec, self._read_member(packed), EntryStat(*packed.stat), self._place(packed))

        index = self.packs[spec.kind]
        with self._packs_readable(spec.kind):
            index.refresh(max_age_s=LIST_AGE_S)
            try:
                return index.first(spec.key, check)
            except WrongEntryError as err:
                packed = index.places(spec.key)[0]
                return EntryState(
                    "wrong", str(err), EntryStat(*packed.stat), place_in_pack=self._place(packed)
                )

    def stats(self, kind: Kind, keys: Collection[str]) -> npt.NDArray[np.int64]:
        """Return the `EntryStat` of many entries as int64 (N, 4), in the order of `keys`.

        A row is `NO_STAT` if the key has no regular file and is in no pack. Files are not opened.

        Raises:
            StoreError: The cache cannot be listed.
        """
        try:
            stats = self.folder.entry_stats(kind, keys)
        except OSError as err:
            raise self._access_error(kind, err, "listed") from err

        is_missing = (stats == NO_STAT).all(axis=1)
        if is_missing.any():
            with self._packs_readable(kind):
                self.packs[kind].refresh()
            stats[is_missing] = self.packs[kind].stats(digests_of(compress(keys, is_missing)))
        return stats

    def packed(self, kind: Kind, keys: Iterable[str]) -> set[str]:
        """Return the subset of `keys` that packs hold; raises StoreError if the packs cannot be read."""
        index = self.packs[kind]
        with self._packs_readable(kind):
            index.refresh()
        return {key for key in keys if index.places(key)}

    def damaged_packs(self) -> dict[str, str]:
        """Return the defects of damaged packs by location; all entries of these packs count as missing.

        Raises:
            StoreError: The packs cannot be read.
        """
        problems: dict[str, str] = {}
        for kind, index in self.packs.items():
            with self._packs_readable(kind):
                index.refresh()
            problems |= {self.folder.where(name): text for name, text in index.problems.items()}
        return problems

    def read_tensor_specs(self, spec: EntrySpec) -> dict[str, TensorSpec] | None:
        """Return the shapes and dtypes in an entry's header, unverified; None without a readable header."""
        try:
            return stated_tensors(self._header(spec.kind, spec.key))
        except (OSError, WrongEntryError):
            return None

    def read_metadata(self, kind: Kind, key: str) -> dict[str, Any] | None:
        """Return the metadata in an entry's header, unverified; None without a readable header."""
        try:
            return stated_metadata(self._header(kind, key))
        except (OSError, WrongEntryError):
            return None

    def _header(self, kind: Kind, key: str) -> dict[str, Any]:
        name = entry_name(kind, key)
        try:
            # A header is much smaller than its entry, and on a service each byte is transferred.
            return read_header(self.folder.read_range(name, 0, DATA_START))
        except FileNotFoundError:
            header = self.packs[kind].first(
                key, lambda packed: read_header(self._read_member(packed, DATA_START))
            )
            if header is None:
                raise
            return header

    def read(self, spec: EntrySpec, *, verify: bool = False) -> dict[str, Array]:
        """Read an entry's tensors as read-only arrays; bfloat16 as its bits, in uint16.

        Every call checks size, header, key, shapes and dtypes. With `verify`, it checks the checksum too.

        Raises:
            StoreError: The entry is missing or does not match `spec`.
        """
        # On a service, a request for a missing single file costs as much as one for an existing file.
        if self.folder.reads_packs_first and (arrays := self._read_listed(spec)) is not None:
            return arrays

        name = entry_name(spec.kind, spec.key)
        try:
            # A job has verified the checksum with `check`, and training reads each entry many times. What a
            # service sends may be damaged on its way each time.
            verify = verify or self.folder.reads_packs_first
            return parse(spec, self.folder.read(name), verify=verify)[0]
        except WrongEntryError as err:
            raise damaged_error(self.where(spec), err) from err
        except (FileNotFoundError, NotAFileError) as err:
            arrays = self._read_packed(spec)
            if arrays is not None:
                return arrays
            if isinstance(err, NotAFileError):
                raise damaged_error(self.where(spec), WrongEntryError(str(err))) from err
            raise self._access_error(name, err, "read") from err
        except OSError as err:
            raise self._access_error(name, err, "read") from err

    def _read_packed(self, spec: EntrySpec) -> dict[str, Array] | None:
        index = self.packs[spec.kind]
        with self._packs_readable(spec.kind):
            try:
                return index.first(
                    spec.key, lambda packed: parse(spec, self._read_member(packed), verify=True)[0]
                )
            except WrongEntryError as err:
                raise damaged_error(self._place(index.places(spec.key)[0]), err) from err

    def _read_listed(self, spec: EntrySpec) -> dict[str, Array] | None:
        """Return the verified arrays of an entry in a pack that was listed; None if it is not valid there."""
        for packed in self.packs[spec.kind].places(spec.key):
            copied = self.copies and self.copies.read(
                packed.pack, packed.offset, packed.offset + packed.length
            )
            if copied is not None:
                with suppress(WrongEntryError):
                    return parse(spec, copied, verify=True)[0]

            try:
                with self._packs_readable(spec.kind):
                    arrays = parse(spec, self._read_member(packed), verify=True)[0]
            except (FileNotFoundError, WrongEntryError):
                continue
            if self.copies:
                # The remote entry is valid and the copied one is not, so the copy is damaged.
                if copied is not None:
                    self.copies.discard(packed.pack)
                self.copies.want(packed.pack, packed.pack_bytes)
            return arrays
        return None

    def read_verified(self, spec: EntrySpec) -> bytes:
        """Return the bytes of an entry's file after verifying them completely.

        Raises:
            WrongEntryError: The file is missing or wrong.
            StoreError: The file cannot be read.
        """
        name = entry_name(spec.kind, spec.key)
        try:
            raw = self.folder.read(name)
        except FileNotFoundError as err:
            raise WrongEntryError("the entry is missing") from err
        except NotAFileError as err:
            raise WrongEntryError(str(err)) from err
        except OSError as err:
            raise self._access_error(name, err, "read") from err
        parse(spec, raw, verify=True)
        return raw

    def write(self, spec: EntrySpec, tensors: Mapping[str, Array], metadata: Mapping[str, Any]) -> bool:
        """Write an entry's file unless a valid one exists: the first valid file wins.

        A wrong file is replaced. A folder at the entry's path is renamed. The metadata must depend on nothing
        but the key; for arrays see `serialise`. Returns True if this call's entry is in place.

        Raises:
            StoreError: The disk is full, or the path cannot be written.
            ValueError: The tensors do not match `spec`, or the header is too long.
        """
        return self._create(spec, serialise(spec, tensors, metadata))

    def discard(self, spec: EntrySpec) -> None:
        """Delete a damaged entry, so that the next cache job encodes it unless it is valid in a pack.

        Raises:
            StoreError: A file cannot be read, deleted or written.
        """
        name = entry_name(spec.kind, spec.key)
        try:
            with suppress(FileNotFoundError, NotAFileError):
                self.folder.stat(name)
                self.folder.delete(name)
        except OSError as err:
            raise self._access_error(name, err, "deleted") from err

        # A pack never changes, and bit rot leaves its stat as recorded. An empty file precedes the pack, has
        # another stat and is wrong.
        state = self.check(spec)
        if state.place_in_pack and not state.valid:
            self._create(spec, b"")

    def _create(self, spec: EntrySpec, raw: bytes) -> bool:
        def is_valid(existing: bytes) -> bool:
            try:
                parse(spec, existing, verify=True)
            except WrongEntryError:
                return False
            return True

        name = entry_name(spec.kind, spec.key)
        try:
            return self.folder.create(name, raw, is_valid)
        except OSError as err:
            if is_disk_full(err):
                raise entry_disk_full_error(len(raw), self.where(spec)) from err
            raise self._access_error(name, err, "written") from err

    def _read_member(self, packed: PackedEntry, max_bytes: int | None = None) -> bytes:
        length = packed.length if max_bytes is None else min(packed.length, max_bytes)
        return self.folder.read_range(packed.pack, packed.offset, packed.offset + length)

    def _place(self, packed: PackedEntry) -> str:
        return f"{self.folder.where(packed.pack)} from byte {packed.offset:,}"

    def _access_error(self, name: str, err: OSError, action: str) -> StoreError:
        missing = isinstance(err, FileNotFoundError) and action == "read"
        return StoreError(
            f"a cache entry cannot be {action}: {err.strerror or err}",
            where=self.folder.where(name),
            fix="start the cache job again: it encodes missing entries" if missing else self.folder.fix,
        )

    @contextmanager
    def _packs_readable(self, kind: Kind) -> Generator[None]:
        """Raise errors of the file system as a `StoreError`; a missing file is handled by the body."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as err:
            raise self.packs_error(kind, err, "read") from err

    def packs_error(self, kind: Kind, err: OSError, action: str) -> StoreError:
        """Return the error for packs that cannot be read or written."""
        return StoreError(
            f"the packs of the cache cannot be {action}: {err.strerror or err}",
            where=self.folder.where(pack_folder(kind)),
            fix=self.folder.fix,
        )


def _verified(spec: EntrySpec, raw: bytes, stat: EntryStat, place_in_pack: str = "") -> EntryState:
    arrays, metadata = parse(spec, raw, verify=True)
    shapes = {name: array.shape for name, array in arrays.items()}
    return EntryState("valid", stat=stat, metadata=metadata, shapes=shapes, place_in_pack=place_in_pack)
