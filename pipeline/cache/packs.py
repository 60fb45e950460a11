"""Packs: immutable safetensors files that hold about 1,000 cache entries of one kind each.

    <cache_dir>/packs/<kind>/<sha256 of the file>.pack

    bytes 0-7     length of the header, little endian
    header        JSON of the safetensors format, padded with spaces to a multiple of 8 bytes
    data          the entries in the order of their keys; each has the bytes of its single file

An entry has the tensors `<key>/header`, which is the first 2048 bytes of its file with metadata and
checksum, and `<key>/<tensor>` for each tensor in the file. So one range of a pack is a complete entry, which
is parsed and verified as a single file is. The header of the pack is an index of 280 bytes per entry.

A pack never changes: a damaged entry in it is replaced by a single file, which precedes it.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.cache.entry_format import (
    DATA_START,
    EntrySpec,
    Kind,
    WrongEntryError,
    parse,
    read_header,
    stated_tensors,
)
from pipeline.cache.folder import NO_STAT, CacheFolder, FileStat

Result = TypeVar("Result")

PACKS = "packs"
"""Name of the folder with the packs of all kinds."""

PACK_SUFFIX = ".pack"

# Workers check each entry before they encode it, and listing 1,000 packs takes 0.2 s. An entry that was
# packed and deleted in the last minute is encoded again.
LIST_AGE_S = 60.0
"""Age up to which a check of a missing entry uses the last list of the packs."""

_MAX_HEADER_BYTES = 2**24
"""Largest header that is read; 1,000 entries need 0.3 MB."""

_FIRST_READ_BYTES = 5 * 2**16
"""Number of bytes that are read first: the header of 1,000 entries with one tensor, in one request."""

_ALIGNMENT = 8
"""Multiple at which data and entries start, so that the safetensors library can view any dtype."""

_HEADER, _PADDING = "header", "padding"

_NAME = re.compile(rf"[0-9a-f]{{64}}{re.escape(PACK_SUFFIX)}")
_KEY = re.compile(r"[0-9a-f]{64}")

# The beginning of a key is enough: a reader compares the complete key in the entry.
_DIGEST_BYTES = 16
"""Number of bytes of a key that are in memory."""

_HEADERS_AT_ONCE = 16


class WrongPackError(Exception):
    """The header of a pack is damaged; the text is the reason."""


def pack_folder(kind: Kind) -> str:
    """Return the folder of a kind's packs, relative to the cache."""
    return f"{PACKS}/{kind}"


def build_pack(kind: Kind, entries: Mapping[str, bytes]) -> tuple[str, bytes]:
    """Return the name of a pack relative to the cache, and its bytes; equal entries give equal results.

    `entries` has the valid bytes of each entry's file by key, of 64 hex digits, in any order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "1", "kind": kind}}
    data: list[bytes] = []
    at = 0

    def add(name: str, dtype: str, shape: list[int], start: int, end: int) -> None:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}

    for key in sorted(entries):
        assert _KEY.fullmatch(key), "keys of packed entries have 64 digits"
        raw = entries[key]
        # Each process reads the headers of all packs. With the metadata of entries, they would be three times
        # as long.
        add(f"{key}/{_HEADER}", "U8", [DATA_START], at, at + DATA_START)
        for name, tensor in read_header(raw[:DATA_START]).items():
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                add(
                    f"{key}/{name}",
                    tensor["dtype"],
                    tensor["shape"],
                    *(at + DATA_START + n for n in (start, end)),
                )
        data.append(raw)
        at += len(raw)

        # The safetensors format has no gaps between tensors.
        if num_padding := -at % _ALIGNMENT:
            add(f"{key}/{_PADDING}", "U8", [num_padding], at, at + num_padding)
            data.append(bytes(num_padding))
            at += num_padding

    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT)
    content = b"".join([len(text).to_bytes(8, "little"), text, *data])
    return f"{pack_folder(kind)}/{hashlib.sha256(content).hexdigest()}{PACK_SUFFIX}", content


@dataclass(frozen=True)
class Members:
    """Entries of a pack.

    Attributes:
        keys: Keys in order.
        offsets: First byte of each entry in the pack.
        lengths: Number of bytes of each entry.
    """

    keys: tuple[str, ...]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


def read_members(folder: CacheFolder, name: str, pack_bytes: int) -> Members:
    """Read the header of the pack `name`, a path relative to the cache.

    Raises:
        WrongPackError: The header is damaged.
        OSError: The pack cannot be read.
    """
    # A service refuses a range of an empty file.
    start = folder.read_range(name, 0, min(pack_bytes, _FIRST_READ_BYTES)) if pack_bytes else b""
    data_start = _data_start(start, pack_bytes)
    if data_start > len(start):
        start += folder.read_range(name, len(start), data_start)
    return _parse_members(start[8:data_start], data_start, pack_bytes)


def _data_start(start: bytes, pack_bytes: int) -> int:
    # The size in a damaged header may be anything, and must not decide how much is read.
    data_start = 8 + int.from_bytes(start[:8], "little")
    if len(start) < 8 or data_start > min(pack_bytes, _MAX_HEADER_BYTES):
        raise WrongPackError(
            f"a header of {data_start - 8:,} bytes does not fit a pack of {pack_bytes:,} bytes"
        )
    return data_start


def _parse_members(text: bytes, data_start: int, pack_bytes: int) -> Members:
    # Only the places of entries: their shapes are verified when an entry is read.
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    try:
        header = json.loads(text)
        for name, tensor in header.items():
            key, _, tensor_name = name.partition("/")
            if name == "__metadata__" or tensor_name == _PADDING:
                continue
            start, end = tensor["data_offsets"]
            if tensor_name == _HEADER:
                starts[key] = start
            ends[key] = max(ends.get(key, 0), end)

        keys = tuple(sorted(starts))
        offsets = np.fromiter((starts[key] for key in keys), np.int64, len(keys))
        lengths = np.fromiter((ends[key] for key in keys), np.int64, len(keys)) - offsets
    # RecursionError: deep nesting such as [[[[...
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as err:
        raise WrongPackError("its header does not describe cache entries") from err

    is_inside = (offsets >= 0) & (offsets <= pack_bytes - data_start - DATA_START)
    is_inside &= (lengths > DATA_START) & (lengths <= pack_bytes - data_start - offsets)
    if ends.keys() != starts.keys() or not all(map(_KEY.fullmatch, keys)) or not is_inside.all():
        raise WrongPackError("its header describes something else than entries in the pack")
    return Members(keys, offsets + data_start, lengths)


@dataclass(frozen=True)
class Pack:
    """A pack, for commands that list and delete packs.

    Attributes:
        name: Name relative to the cache, with which `CacheFolder` reads and deletes it.
        stat: Stat of the file.
        keys: Keys of its entries; none if the header is damaged.
        problem: Defect of the header; empty for a valid pack.
    """

    name: str
    stat: FileStat
    keys: tuple[str, ...]
    problem: str = ""


def list_packs(folder: CacheFolder, kind: Kind) -> Iterator[Pack]:
    """Yield the packs of a kind in the order of their names; one that is deleted meanwhile is omitted."""
    for name, stat in _pack_stats(folder, kind).items():
        try:
            yield Pack(name, stat, read_members(folder, name, stat[0]).keys)
        except FileNotFoundError:
            continue
        except WrongPackError as err:
            yield Pack(name, stat, (), str(err))


def wrong_members(folder: CacheFolder, kind: Kind, pack: Pack) -> dict[str, str]:
    """Read a pack completely, and return the defects of its wrong entries by key."""
    content = folder.read(pack.name)
    try:
        data_start = _data_start(content[:8], len(content))
        members = _parse_members(content[8:data_start], data_start, len(content))
    except WrongPackError as err:
        return dict.fromkeys(pack.keys, str(err))

    problems: dict[str, str] = {}
    for key, offset, length in zip(members.keys, members.offsets, members.lengths, strict=True):
        raw = content[offset : offset + length]
        try:
            stated = stated_tensors(read_header(raw[:DATA_START]))
            parse(EntrySpec(kind, key, stated), raw, verify=True)
        except WrongEntryError as err:
            problems[key] = str(err)
    return problems


def _pack_stats(folder: CacheFolder, kind: Kind) -> dict[str, FileStat]:
    stats = folder.stats(pack_folder(kind))
    return {f"{pack_folder(kind)}/{name}": stats[name] for name in sorted(stats) if _NAME.fullmatch(name)}


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """Place of an entry.

    Attributes:
        pack: Name of the pack, relative to the cache.
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
    """Places of all entries, sorted by the beginning of the key and then by pack: 36 bytes per entry."""

    digests: npt.NDArray[np.bytes_]
    pack_numbers: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    @staticmethod
    def of(members: Members, number: int) -> _Rows:
        digests = np.frombuffer(digests_of(members.keys), f"S{_DIGEST_BYTES}")
        numbers = np.full(len(members.keys), number, np.int32)
        return _Rows(digests, numbers, members.offsets, members.lengths)

    @staticmethod
    def none() -> _Rows:
        nothing = np.zeros(0, np.int64)
        return _Rows.of(Members((), nothing, nothing), 0)

    def renumbered(self, numbers: npt.NDArray[np.int32]) -> _Rows:
        """Return the rows with other pack numbers, without the rows of the packs that get -1."""
        new_numbers = numbers[self.pack_numbers]
        kept = new_numbers >= 0
        return _Rows(self.digests[kept], new_numbers[kept], self.offsets[kept], self.lengths[kept])

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
    """Packs at one time, in the order of their numbers; the places of their entries, and problems by name."""

    names: tuple[str, ...]
    stats: tuple[FileStat, ...]
    rows: _Rows
    problems: dict[str, str]


class PackIndex:
    """Lookup of packed entries of one kind; it can be used from several threads.

    The headers of all packs are read once, when the first single entry is missing.
    """

    def __init__(
        self, folder: CacheFolder, kind: Kind, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._kind: Kind = kind
        self._clock = clock
        self._loaded = _Loaded((), (), _Rows.none(), {})
        self._lock = threading.Lock()
        self._listed_s = -float("inf")

    def refresh(self, *, max_age_s: float = 0.0) -> None:
        """List the packs, unless the last listing began less than `max_age_s` ago, and read new headers.

        Raises:
            OSError: The folder cannot be listed, or a pack cannot be read.
        """
        oldest_s = self._clock() - max_age_s
        with self._lock:
            if self._listed_s > oldest_s:
                return

            # The begin of the listing counts, because it may miss a pack that is written meanwhile. Threads
            # that wait for a listing which began after their call do not list again.
            listed_s = self._clock()
            self._load()
            self._listed_s = listed_s

    @property
    def problems(self) -> dict[str, str]:
        """Defects of the packs that cannot be used, by name, as of the last `refresh`."""
        return dict(self._loaded.problems)

    def places(self, key: str) -> list[PackedEntry]:
        """Return the places of an entry as of the last `refresh`, in the order of the packs' names."""
        loaded = self._loaded
        digest = np.frombuffer(digests_of([key]), f"S{_DIGEST_BYTES}")[0]
        start, end = (int(np.searchsorted(loaded.rows.digests, digest, side)) for side in ("left", "right"))

        # Packs that were written at the same time may share entries.
        return [_place(loaded, at) for at in range(start, end)]

    def first(self, key: str, use: Callable[[PackedEntry], Result]) -> Result | None:
        """Return the result of `use` for the first place of an entry where it succeeds; None without one.

        Raises:
            WrongEntryError: `use` raised it for each pack that holds the entry.
            OSError: As `refresh`.
        """
        wrong: WrongEntryError | None = None
        for is_current in (False, True):
            # A pack that was listed earlier may have been deleted, and then the entry may be in another one.
            if is_current:
                wrong = None
                self.refresh()
            for packed in self.places(key):
                try:
                    return use(packed)
                except FileNotFoundError:
                    continue
                except WrongEntryError as err:
                    wrong = wrong or err
        if wrong is not None:
            raise wrong
        return None

    def stats(self, digests: bytes) -> npt.NDArray[np.int64]:
        """Return the stats of N entries as of the last `refresh`: int64 (N, 4), the fields of `FileStat`.

        An entry has its own size, and the other fields of its pack. An entry in no pack has `NO_STAT`.
        `digests` is the result of `digests_of` for the keys.
        """
        loaded = self._loaded
        rows = loaded.rows
        wanted = np.frombuffer(digests, f"S{_DIGEST_BYTES}")
        result = np.tile(np.array(NO_STAT, np.int64), (len(wanted), 1))
        if not len(rows.digests):
            return result

        at = np.minimum(np.searchsorted(rows.digests, wanted), len(rows.digests) - 1)
        is_packed = rows.digests[at] == wanted
        at = at[is_packed]
        result[is_packed] = np.array(loaded.stats, np.int64)[rows.pack_numbers[at]]
        result[is_packed, 0] = rows.lengths[at]
        return result

    def _load(self) -> None:
        old, stats = self._loaded, _pack_stats(self._folder, self._kind)
        old_stats = dict(zip(old.names, old.stats, strict=True))
        if stats == old_stats:
            return

        unread = [name for name, stat in stats.items() if old_stats.get(name) != stat]
        with ThreadPoolExecutor(_HEADERS_AT_ONCE, thread_name_prefix="latentline-packs") as pool:
            headers = dict(
                zip(unread, pool.map(lambda name: self._header(name, stats[name][0]), unread), strict=True)
            )
        # A pack that was deleted since the listing may be restored with the same stat, and is then read.
        names = tuple(name for name in stats if headers.get(name, "") is not None)

        numbers = {name: number for number, name in enumerate(names)}
        kept = [-1 if name in headers else numbers.get(name, -1) for name in old.names]
        parts = [old.rows.renumbered(np.array(kept, np.int32))]
        parts += [
            _Rows.of(each, numbers[name]) for name, each in headers.items() if isinstance(each, Members)
        ]
        problems = {
            name: text for name, text in old.problems.items() if name in numbers and name not in headers
        }
        problems |= {name: each for name, each in headers.items() if isinstance(each, str)}
        self._loaded = _Loaded(names, tuple(stats[name] for name in names), _Rows.sorted(parts), problems)

    def _header(self, name: str, pack_bytes: int) -> Members | str | None:
        try:
            return read_members(self._folder, name, pack_bytes)
        except FileNotFoundError:
            return None
        except WrongPackError as err:
            return str(err)


def _place(loaded: _Loaded, at: int) -> PackedEntry:
    number, length = int(loaded.rows.pack_numbers[at]), int(loaded.rows.lengths[at])
    pack_bytes, mtime_ns, ctime_ns, inode = loaded.stats[number]
    stat = length, mtime_ns, ctime_ns, inode
    return PackedEntry(loaded.names[number], int(loaded.rows.offsets[at]), length, pack_bytes, stat)


def digests_of(keys: Iterable[str]) -> bytes:
    """Return the first `_DIGEST_BYTES` bytes of each hex key, joined."""
    num_digits = 2 * _DIGEST_BYTES
    return b"".join(bytes.fromhex(key[:num_digits].ljust(num_digits, "0")) for key in keys)
