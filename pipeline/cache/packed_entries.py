"""Entries in packs, as the store reads and checks them when an entry has no file of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.cache.entry_format import (
    DATA_START,
    KINDS,
    Array,
    EntrySpec,
    Kind,
    WrongEntryError,
    parse,
    read_header,
)
from pipeline.cache.entry_state import EntryStat, EntryState
from pipeline.cache.folder import CacheFolder
from pipeline.cache.pack_copies import PackCopies
from pipeline.cache.pack_format import pack_path
from pipeline.cache.pack_index import PackedEntry, PackIndex, remove_rows

Result = TypeVar("Result")


class PackedEntries:
    """Packed entries of all kinds; it can be used from several threads.

    Methods raise `OSError` if the file system refuses.

    Attributes:
        folder: Files of the cache.
    """

    def __init__(self, folder: CacheFolder) -> None:
        """Use the packs of a cache; nothing is read yet."""
        self.folder = folder
        self._indexes = {kind: PackIndex(folder, kind) for kind in KINDS}

    def where(self, spec: EntrySpec) -> str:
        """Return the location of an entry for messages, as of the last request; empty if it is in no pack."""
        packed = self._indexes[spec.kind].find(spec.key)
        return "" if packed is None else self._shown(spec, packed)

    def stats(self, kind: Kind, digests: bytes | bytearray) -> npt.NDArray[np.int64]:
        """Return the stats of many entries; see `PackIndex.stats`."""
        index = self._indexes[kind]
        index.refresh()
        return index.stats(digests)

    def among(self, kind: Kind, keys: Iterable[str]) -> set[str]:
        """Return the keys that are in packs."""
        index = self._indexes[kind]
        index.refresh()
        return {key for key in keys if index.find(key) is not None}

    def check(self, spec: EntrySpec, trusted: EntryStat | None) -> EntryState:
        """Check an entry as `Store.check`; it is "missing" if it is in no pack."""

        def check(packed: PackedEntry) -> EntryState:
            stat, where = EntryStat(*packed.stat), self._shown(spec, packed)
            if trusted is not None and stat == trusted and spec.may_have(packed.length):
                return EntryState("valid", stat=stat, place_in_pack=where)
            arrays, metadata = parse(spec, self._bytes(spec, packed), verify=True)
            shapes = {name: array.shape for name, array in arrays.items()}
            return EntryState("valid", stat=stat, metadata=metadata, shapes=shapes, place_in_pack=where)

        try:
            return self._with_place(spec, check) or EntryState("missing")
        except WrongEntryError as err:
            packed = self._indexes[spec.kind].find(spec.key)
            stat = None if packed is None else EntryStat(*packed.stat)
            return EntryState("wrong", str(err), stat, place_in_pack=self.where(spec))

    def read(self, spec: EntrySpec) -> dict[str, Array] | None:
        """Return the arrays of an entry after verifying it; None if it is in no pack.

        Raises:
            WrongEntryError: In each pack that holds the entry, it does not match `spec` or its checksum.
        """
        return self._with_place(spec, lambda packed: parse(spec, self._bytes(spec, packed), verify=True)[0])

    def read_known(self, spec: EntrySpec, copies: Callable[[], PackCopies]) -> dict[str, Array] | None:
        """Return the arrays of an entry in a pack that is in memory; None if it is not valid there.

        The pack is read from its copy in `copies`, or remotely until it is copied. A copy is discarded if the
        remote entry is valid and the copied one is not.
        """
        for packed in self._indexes[spec.kind].places(spec.key):
            pack = pack_path(spec.kind, packed.pack)
            copied = copies().read(pack, packed.offset, packed.offset + packed.length)
            if copied is not None:
                with suppress(WrongEntryError):
                    return parse(spec, copied, verify=True)[0]

            try:
                arrays = parse(spec, self._bytes(spec, packed), verify=True)[0]
            except (FileNotFoundError, WrongEntryError):
                continue
            if copied is not None:
                copies().discard(pack)
            copies().want(pack, packed.pack_bytes)
            return arrays
        return None

    def header(self, spec: EntrySpec) -> dict[str, Any] | None:
        """Return the header of an entry, unverified; None if it is in no pack.

        Raises:
            WrongEntryError: The header cannot be read.
        """
        return self._with_place(spec, lambda packed: read_header(self._bytes(spec, packed, DATA_START)))

    def remove(self, specs: Iterable[EntrySpec]) -> None:
        """Remove entries from the indexes of all packs, so that they count as missing.

        Each index is replaced once.
        """
        by_kind: dict[Kind, set[str]] = {}
        for spec in specs:
            by_kind.setdefault(spec.kind, set()).add(spec.key)

        for kind, keys in by_kind.items():
            index = self._indexes[kind]
            index.refresh()
            by_pack: dict[str, list[str]] = {}
            for key in sorted(keys):
                for packed in index.places(key):
                    by_pack.setdefault(packed.pack, []).append(key)
            for pack, own_keys in by_pack.items():
                remove_rows(self.folder, kind, pack, own_keys)
            if by_pack:
                index.refresh()

    def _with_place(self, spec: EntrySpec, use: Callable[[PackedEntry], Result]) -> Result | None:
        """Return the result of `use` for a place of an entry where it succeeds; None if it is in no pack.

        A pack that was loaded earlier may have been removed, and then the entry may be in another one.

        Raises:
            WrongEntryError: In each pack that holds the entry, `use` raised it.
        """
        index = self._indexes[spec.kind]
        wrong: WrongEntryError | None = None
        for is_current in (False, True):
            if is_current:
                wrong = None
                index.refresh()
            for packed in index.places(spec.key):
                try:
                    return use(packed)
                except FileNotFoundError:
                    continue
                except WrongEntryError as err:
                    wrong = wrong or err
        if wrong is not None:
            raise wrong
        return None

    def _shown(self, spec: EntrySpec, packed: PackedEntry) -> str:
        return f"{self.folder.where(pack_path(spec.kind, packed.pack))} from byte {packed.offset:,}"

    def _bytes(self, spec: EntrySpec, packed: PackedEntry, max_bytes: int | None = None) -> bytes:
        end = packed.offset + (packed.length if max_bytes is None else min(packed.length, max_bytes))
        return self.folder.read_range(pack_path(spec.kind, packed.pack), packed.offset, end)
