"""Lookup of packed entries of one kind by key.

The rows of all indexes are in memory: 36 bytes per packed entry, whoever needs it. They are read when the
first single entry is missing, and again when the file `CHANGED` has been replaced.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline.cache.entry_format import Kind
from pipeline.cache.entry_state import NO_STAT
from pipeline.cache.folder import CacheFolder, FileStat
from pipeline.cache.pack_format import (
    CHANGED,
    INDEX_SUFFIX,
    PACK_SUFFIX,
    WrongPackError,
    index_bytes,
    index_path,
    pack_folder,
    parse_index,
)

if TYPE_CHECKING:
    import polars as pl

_DIGEST_BYTES = 16
"""Number of bytes of a key that are compared. The entry itself states its complete key."""

NO_DIGEST = bytes(_DIGEST_BYTES)
"""Digest of no entry, for `PackIndex.stats`."""

_INDEXES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """Place of an entry.

    Attributes:
        pack: Name of the pack.
        offset: First byte of the entry in the pack.
        length: Number of bytes.
        pack_bytes: Size of the pack.
        stat: Stat of the pack's file, with the size of the entry.
    """

    pack: str
    offset: int
    length: int
    pack_bytes: int
    stat: FileStat


@dataclass(frozen=True)
class _Rows:
    """Rows of all indexes, sorted by the beginning of the key, and then by the pack."""

    digests: npt.NDArray[np.bytes_]
    pack_numbers: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    @staticmethod
    def none() -> _Rows:
        zero = np.zeros(0, np.int64)
        return _Rows(np.zeros(0, f"S{_DIGEST_BYTES}"), zero.astype(np.int32), zero, zero)

    @staticmethod
    def of(index: pl.DataFrame, number: int) -> _Rows:
        digests = np.frombuffer(digests_of(index["key"]), f"S{_DIGEST_BYTES}")
        numbers = np.full(len(index), number, np.int32)
        return _Rows(digests, numbers, index["offset"].to_numpy(), index["length"].to_numpy())

    def renumbered(self, numbers: npt.NDArray[np.int32]) -> _Rows:
        """Return the rows with other pack numbers, without those of the packs that get -1."""
        new_numbers = numbers[self.pack_numbers]
        is_kept = new_numbers >= 0
        return _Rows(
            self.digests[is_kept], new_numbers[is_kept], self.offsets[is_kept], self.lengths[is_kept]
        )

    @staticmethod
    def sorted(parts: Iterable[_Rows]) -> _Rows:
        parts = list(parts)
        digests = np.concatenate([each.digests for each in parts])
        pack_numbers = np.concatenate([each.pack_numbers for each in parts])
        order = np.lexsort((pack_numbers, digests))
        offsets = np.concatenate([each.offsets for each in parts])
        lengths = np.concatenate([each.lengths for each in parts])
        return _Rows(digests[order], pack_numbers[order], offsets[order], lengths[order])


@dataclass(frozen=True)
class _Loaded:
    """Packs at one time: their names, stats and the stats of their indexes, by pack number, and all rows.

    The stat of an index is `NO_STAT` if it was deleted before it could be read.
    """

    token: bytes | None
    packs: tuple[str, ...]
    stats: tuple[FileStat, ...]
    index_stats: tuple[FileStat, ...]
    rows: _Rows


class PackIndex:
    """Packed entries of one kind; it can be used from several threads."""

    def __init__(self, folder: CacheFolder, kind: Kind) -> None:
        """Use the packs of a cache; nothing is read yet."""
        self._folder = folder
        self._kind: Kind = kind
        self._loaded = _Loaded(None, (), (), (), _Rows.none())
        self._lock = threading.Lock()
        self._num_started = self._last_finished = 0

    def refresh(self) -> None:
        """Make `find` use the packs that exist now.

        Costs one small request while no pack is added or removed. Threads that wait for the lock share one
        refresh, which starts after all of them have called.

        Raises:
            OSError: The folder cannot be listed, or an index cannot be read.
        """
        num_started = self._num_started
        with self._lock:
            if self._last_finished > num_started:
                return
            self._num_started += 1
            # The token is read first: if packs change after that, the next call sees another token.
            token = read_token(self._folder, self._kind)
            if token != self._loaded.token:
                self._loaded = self._load(token)
            self._last_finished = self._num_started

    def find(self, key: str) -> PackedEntry | None:
        """Return the first place of an entry, see `places`; None if it is in no pack."""
        return next(iter(self.places(key)), None)

    def places(self, key: str) -> list[PackedEntry]:
        """Return the places of an entry as of the last `refresh`, in the order of the packs' names.

        Packs that were written at the same time may share entries.
        """
        loaded = self._loaded
        digests = loaded.rows.digests
        digest = np.frombuffer(digests_of([key]), f"S{_DIGEST_BYTES}")[0]
        start, end = (int(np.searchsorted(digests, digest, side)) for side in ("left", "right"))
        return [_place(loaded, at) for at in range(start, end)]

    def stats(self, digests: bytes | bytearray) -> npt.NDArray[np.int64]:
        """Return the stats of many entries as int64 (N, 4), zeros for entries in no pack.

        Args:
            digests: See `digests_of`.
        """
        loaded = self._loaded
        rows = loaded.rows
        wanted = np.frombuffer(digests, f"S{_DIGEST_BYTES}")
        result = np.zeros((len(wanted), 4), np.int64)
        if not len(rows.digests):
            return result

        at = np.minimum(np.searchsorted(rows.digests, wanted), len(rows.digests) - 1)
        is_packed = rows.digests[at] == wanted
        at = at[is_packed]
        result[is_packed] = np.array(loaded.stats, np.int64)[rows.pack_numbers[at]]
        result[is_packed, 0] = rows.lengths[at]
        return result

    def _load(self, token: bytes) -> _Loaded:
        """Read the indexes that are new or changed; a damaged index counts as missing."""
        files = self._folder.stats(pack_folder(self._kind)) if token else {}
        stems = sorted(name.removesuffix(INDEX_SUFFIX) for name in files if name.endswith(INDEX_SUFFIX))
        packs = [pack for pack in stems if f"{pack}{PACK_SUFFIX}" in files]
        stats = tuple(files[f"{pack}{PACK_SUFFIX}"] for pack in packs)
        index_stats = tuple(files[f"{pack}{INDEX_SUFFIX}"] for pack in packs)

        old = self._loaded
        old_indexes = zip(old.packs, old.index_stats, strict=True)
        old_numbers = {each: number for number, each in enumerate(old_indexes)}
        new_numbers = np.full(len(old.packs), -1, np.int32)
        unread: list[int] = []
        for number, each in enumerate(zip(packs, index_stats, strict=True)):
            if each in old_numbers and stats[number] == old.stats[old_numbers[each]]:
                new_numbers[old_numbers[each]] = number
            else:
                unread.append(number)

        def read(number: int) -> _Rows | None:
            return self._read(packs[number], number, stats[number][0])

        with ThreadPoolExecutor(_INDEXES_AT_ONCE, thread_name_prefix="latentline-packs") as pool:
            rows = dict(zip(unread, pool.map(read, unread), strict=True))
        # An index that was deleted since the listing may be restored with the same stat, and is then read.
        index_stats = tuple(
            NO_STAT if number in rows and rows[number] is None else stat
            for number, stat in enumerate(index_stats)
        )
        parts = [old.rows.renumbered(new_numbers), *(each for each in rows.values() if each is not None)]
        return _Loaded(token, tuple(packs), stats, index_stats, _Rows.sorted(parts))

    def _read(self, pack: str, number: int, pack_bytes: int) -> _Rows | None:
        """Return the rows of an index, without any if it is damaged; None if it does not exist."""
        try:
            raw = self._folder.read(index_path(self._kind, pack))
            return _Rows.of(parse_index(raw, pack, pack_bytes), number)
        except FileNotFoundError:
            return None
        except WrongPackError:
            return _Rows.none()


def _place(loaded: _Loaded, at: int) -> PackedEntry:
    number, length = int(loaded.rows.pack_numbers[at]), int(loaded.rows.lengths[at])
    pack_bytes, mtime_ns, ctime_ns, inode = loaded.stats[number]
    stat = length, mtime_ns, ctime_ns, inode
    return PackedEntry(loaded.packs[number], int(loaded.rows.offsets[at]), length, pack_bytes, stat)


def digests_of(keys: Iterable[str]) -> bytes:
    """Return the beginnings of keys, `_DIGEST_BYTES` each."""
    num_digits = 2 * _DIGEST_BYTES
    return b"".join(bytes.fromhex(key[:num_digits].ljust(num_digits, "0")) for key in keys)


def read_token(folder: CacheFolder, kind: Kind) -> bytes:
    """Return the content of `CHANGED`, empty if the cache never had packs of this kind."""
    try:
        return folder.read(f"{pack_folder(kind)}/{CHANGED}")
    except FileNotFoundError:
        return b""


def announce_change(folder: CacheFolder, kind: Kind) -> None:
    """Make all readers list the packs again, which they do when they miss an entry.

    Raises:
        OSError: The file cannot be written.
    """
    folder.replace(f"{pack_folder(kind)}/{CHANGED}", secrets.token_hex(16).encode())


def read_index(folder: CacheFolder, kind: Kind, pack: str, pack_bytes: int) -> pl.DataFrame:
    """Return the rows of a pack's index.

    Raises:
        WrongPackError: The index is damaged.
        OSError: The index cannot be read.
    """
    return parse_index(folder.read(index_path(kind, pack)), pack, pack_bytes)


def remove_rows(folder: CacheFolder, kind: Kind, pack: str, keys: Iterable[str]) -> None:
    """Remove damaged entries from a pack's index, so that they count as missing.

    Args:
        folder: Files of the cache.
        kind: Kind of the entries.
        pack: Name of the pack.
        keys: Keys of the entries.

    Raises:
        OSError: The index cannot be read or written.
    """
    import polars as pl

    try:
        pack_bytes = folder.stats(pack_folder(kind)).get(f"{pack}{PACK_SUFFIX}", (0,))[0]
        index = read_index(folder, kind, pack, pack_bytes)
    except (FileNotFoundError, WrongPackError):
        pass  # all of its entries count as missing
    else:
        kept = index.filter(~pl.col("key").is_in(list(keys)))
        folder.replace(index_path(kind, pack), index_bytes(kept))
    announce_change(folder, kind)
