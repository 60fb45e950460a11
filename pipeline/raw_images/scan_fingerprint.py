"""Hash a dataset's file listing: a cheap way for the sensor to detect that any file has changed.

The sensor lists a large dataset in slices, one per tick, because a tick may take only a limited time.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import Protocol, TypeAlias

from pipeline.raw_images.folder import is_ignored
from pipeline.raw_images.shard_list import list_shards
from pipeline.recipe.packed import names_shards
from pipeline.recipe.validators import MANIFEST_SUFFIXES
from pipeline.storage.addresses import Address, Url
from pipeline.storage.remote_source import RemoteSource
from pipeline.storage.source import LocalSource

# An entry takes about 240 bytes.
MAX_ENTRIES_IN_MEMORY = 500_000
"""Largest part of a folder that is sorted in memory at once. All names are read again for each part."""

_SUM_LIMIT = 2**128


@dataclass(frozen=True)
class ScanPosition:
    """Where a listing in slices stopped. Its size depends on one path, not on the number of files.

    Attributes:
        addresses: Hash of the listed addresses.
        index: Number of addresses that are complete.
        after: Names that lead from the address to the last listed entry; empty before the first.
        total: Sum over the listed files, modulo 2**128.
        num_files: Number of listed files.
    """

    addresses: str
    index: int = 0
    after: tuple[str, ...] = ()
    total: int = 0
    num_files: int = 0


def scan_fingerprint(addresses: Iterable[Address]) -> str:
    """Return 16 hex digits over the path, size and times of every file below `addresses`; none is opened.

    Links count by their targets, and loops end. A subfolder that cannot be listed counts as unreadable and
    does not hide changes in other folders. For a remote address, the hash covers the stat from the server.

    Raises:
        OSError: One of `addresses` cannot be listed.
        DatasetError: A remote address cannot be listed.
    """
    fingerprint = scan_slice(list(addresses), None, seconds=math.inf)
    assert isinstance(fingerprint, str), "an unlimited slice is complete"
    return fingerprint


def scan_slice(
    addresses: Sequence[Address], position: ScanPosition | None, *, seconds: float
) -> ScanPosition | str:
    """List files for about `seconds`, and return the new position, or the fingerprint after the last file.

    A slice lists at least one entry. It exceeds its time by reading the names of one local folder, or by
    listing one remote folder. Files that change during the slices may count in either state. A position of
    other addresses counts as None. Errors are as in `scan_fingerprint`.
    """
    end = time.monotonic() + seconds
    start = ScanPosition(_hex(repr([str(each) for each in addresses]).encode("utf-8", "surrogateescape")))
    at = position if position is not None and position.addresses == start.addresses else start

    total, num_files, after = at.total, at.num_files, at.after
    for index in range(at.index, len(addresses)):
        for folder_names, name, line in _lines(addresses[index], after):
            # A sum of hashes depends neither on the slices nor on the order of the files.
            total += int.from_bytes(hashlib.blake2b(line, digest_size=16).digest(), "big")
            num_files += 1

            # Entries are listed in the order of their paths, so one path shows where a slice ended.
            if time.monotonic() > end:
                names = (*folder_names, name)
                return ScanPosition(at.addresses, index, names, total % _SUM_LIMIT, num_files)
        after = ()
    return _hex((total % _SUM_LIMIT).to_bytes(16, "big"))


def _hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


_Item: TypeAlias = tuple[str, bytes | None]
"""Name of an entry of a folder, and the line with the state of a file or None for a folder."""

_ListedFile: TypeAlias = tuple[Sequence[str], str, bytes]
"""Names that lead to a folder, name of a file in it, and the file's line. The first changes later."""


class _Tree(Protocol):
    """Folders to list, by their paths below an address; "" is the address itself."""

    def items(self, folder: str, first: str) -> Iterator[_Item]:
        """Yield the entries of a folder sorted by name, beginning with `first` or the next one."""
        ...

    def path(self, folder: str, name: str) -> str:
        """Return the path of an entry."""
        ...

    def unreadable(self, folder: str, err: OSError) -> bytes:
        """Return the line of a subfolder that cannot be listed."""
        ...

    def is_listed(self, folder: str, open_folders: Sequence[str]) -> bool:
        """Return whether a folder is, or will be, listed under another path; `open_folders` contain it."""
        ...


def _lines(address: Address, after: tuple[str, ...]) -> Iterator[_ListedFile]:
    if names_shards(address):
        # The sensor does not wait for a service that is away, because Dagster limits its time.
        parent = address.parent
        is_remote = isinstance(parent, Url)
        source = RemoteSource(parent, repeat_requests=False) if is_remote else LocalSource(parent)
        for name, stat in list_shards(source, address).items():
            if (name,) > after:
                yield (), name, f"{source.where(name)}\0{stat}\n".encode("utf-8", "surrogateescape")
        return

    if isinstance(address, Url):
        if address.suffix.lower() not in MANIFEST_SUFFIXES:
            yield from _walk(_RemoteTree(address), after)
        elif not after:
            (stat,) = RemoteSource(address.parent, repeat_requests=False).stats([address.name]).tolist()
            yield (), "", f"{address}\0{stat}\n".encode()
        return

    stat = address.stat()
    if S_ISDIR(stat.st_mode):
        yield from _walk(_LocalTree(address), after)
    elif not after:
        yield (), "", os.fsencode(address) + b"\0" + _file_state(stat) + b"\n"


def _walk(tree: _Tree, after: tuple[str, ...]) -> Iterator[_ListedFile]:
    """Yield each file below a tree in the order of the names, except files up to the path `after`."""
    names: list[str] = []
    folders = [""]
    listings = [tree.items("", after[0] if after else "")]
    while listings:
        try:
            item = next(listings[-1], None)
        except OSError as err:
            if not names:
                raise
            yield names[:-1], names[-1], tree.unreadable(folders[-1], err)
            item = None
        if item is None:
            listings.pop()
            folders.pop()
            del names[-1:]
            continue

        name, line = item
        depth = len(names)
        if after and after[depth : depth + 1] != (name,):
            after = ()
        if len(after) == depth + 1:
            continue  # listed in an earlier slice
        if line is not None:
            yield names, name, line
            continue

        folder = tree.path(folders[-1], name)
        if not tree.is_listed(folder, folders):
            names.append(name)
            listings.append(tree.items(folder, after[depth + 1] if after else ""))
            folders.append(folder)


class _LocalTree:
    def __init__(self, top: Path) -> None:
        self._top = str(top)

    def items(self, folder: str, first: str) -> Iterator[_Item]:
        # A folder of many entries is read in parts of bounded size.
        while True:
            part, next_first = _first_entries(self.path(folder, ""), first)
            part.reverse()
            while part:  # an entry that is not referenced any more frees its stat
                entry = part.pop()
                yield entry.name, None if _is_folder(entry) else _line(entry)
            if next_first is None:
                return
            first = next_first

    def path(self, folder: str, name: str) -> str:
        return os.path.join(self._top, folder, name)  # noqa: PTH118 - four times as fast as a Path

    def unreadable(self, folder: str, err: OSError) -> bytes:
        return os.fsencode(folder) + b"\0" + _unreadable_state(err) + b"\n"

    def is_listed(self, folder: str, open_folders: Sequence[str]) -> bool:
        # Only links can lead to a folder that has another path.
        if not os.path.islink(folder):  # noqa: PTH114 - as above
            return False
        target = Path(folder).resolve()
        tops = [Path(self.path(each, "")).resolve() for each in open_folders]
        below_tops = [(top, target.relative_to(top)) for top in tops if target.is_relative_to(top)]
        return any(
            not any(
                is_ignored(each.name, str(top / each.parent)) for each in (path, *path.parents) if each.name
            )
            for top, path in below_tops
        )


def _first_entries(folder: str, first: str) -> tuple[list[os.DirEntry[str]], str | None]:
    """Return up to `MAX_ENTRIES_IN_MEMORY` entries of a folder sorted by name, beginning with `first`.

    The second result is the name of the next entry, or None if there is none.
    """
    limit = MAX_ENTRIES_IN_MEMORY + 1
    part: list[os.DirEntry[str]] = []
    last: str | None = None
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if name < first or is_ignored(name, folder) or (last is not None and name > last):
                continue
            part.append(entry)

            # At twice the limit, so that a large folder is not sorted again for each entry.
            if len(part) == 2 * limit:
                part = sorted(part, key=_name)[:limit]
                last = part[-1].name
    part.sort(key=_name)
    next_first = part[limit - 1].name if len(part) >= limit else None
    return part[: limit - 1], next_first


class _RemoteTree:
    def __init__(self, url: Url) -> None:
        # The sensor does not wait for a service that is away, because Dagster limits its time.
        self._source = RemoteSource(url, repeat_requests=False)

    def items(self, folder: str, first: str) -> Iterator[_Item]:
        # An object store may have a file and a folder of one name; the folder comes first.
        items = self._source.list_folder(folder)
        for item in sorted(items, key=lambda each: (each.path, each.stat is not None)):
            name = item.path.rpartition("/")[2]
            if name < first or is_ignored(name, folder or str(self._source.address)):
                continue
            if item.stat is None and not item.is_special:
                yield name, None
            else:
                line = f"{self._source.where(item.path)}\0{item.stat}\n"
                yield name, line.encode("utf-8", "surrogateescape")

    def path(self, folder: str, name: str) -> str:
        return f"{folder}/{name}" if folder else name

    def unreadable(self, folder: str, err: OSError) -> bytes:
        # A service that cannot list one folder may list none.
        raise err

    def is_listed(self, folder: str, open_folders: Sequence[str]) -> bool:
        # Remote file systems list no links.
        del folder, open_folders
        return False


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _line(entry: os.DirEntry[str]) -> bytes:
    try:
        state = _file_state(entry.stat())
    except OSError as err:  # a deleted file or a broken link is a state of the listing too
        state = _unreadable_state(err)
    return os.fsencode(entry.path) + b"\0" + state + b"\n"


def _unreadable_state(err: OSError) -> bytes:
    return b"unreadable %d" % (err.errno or 0)


def _file_state(stat: os.stat_result) -> bytes:
    # The change time detects a file that was edited and given its old modification time back.
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}".encode("ascii")
