"""The store at an address that fsspec opens: an object store, another machine's disk, memory.

What is relied on: of an object store, that an object appears whole when it is put, which all of them
promise; of any other file system, that a file appears whole under its name when it is moved there. Where an
object can be put on the condition that there is none (S3, Google Cloud Storage), the first of several writers
wins, as on a local disk; elsewhere the later one's entry may stand, and both are valid.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.cache.entry_format import DATA_START, EntrySpec, Kind, WrongEntryError
from pipeline.cache.store import DISPLACED_SUFFIX, NO_STAT, EntryStat, Store
from pipeline.storage.addresses import Address, Url
from pipeline.storage.atomic import temp_name
from pipeline.storage.remote_folder import ACCESS_FIX, RemoteFolder, stat_from_info

_ASKED_SINGLY = 32
"""Up to so many entries are asked for one by one; of more, all that there are get listed."""


def store_at(address: Address) -> Store:
    """The store at a recipe's `cache_dir`; links and fsync of a local disk promise most.

    Raises:
        StoreError: A package is missing, or the address cannot be opened.
    """
    return FsspecStore(address) if isinstance(address, Url) else Store(address)


class FsspecStore(Store):
    """Entries below an address; as `Store`, but for what writers promise.

    What counts as an entry's stat is its size and, in place of an inode, a number for what the service says
    of its version; or else its time. An entry of which neither is told is read whole by each run.
    """

    threads = 16
    readers = 8
    fix = ACCESS_FIX

    def __init__(self, url: Url) -> None:
        """Open the file system; nothing is read yet.

        Raises:
            StoreError: A package is missing, or the address cannot be opened.
        """
        self.folder = RemoteFolder(url)
        super().__init__(Path())
        self.address = url

    def stats(self, kind: Kind, keys: Iterable[str]) -> npt.NDArray[np.int64]:
        """As `Store.stats`; of many keys by one listing, which takes a request per 1,000 entries.

        Raises:
            StoreError: The service does not say.
        """
        asked = list(keys)
        places = [self.path(EntrySpec(kind, key, {})).as_posix() for key in asked]
        if len(asked) > _ASKED_SINGLY:
            try:
                infos = self.folder.list_files(kind)
            except OSError as err:
                raise self._refused(Path(kind), err, "looked for") from err
            stats = [_entry_stat(infos[place]) if place in infos else None for place in places]
        else:
            stats = [self._stat_or_none(Path(place)) for place in places]
        return np.array([astuple(stat) if stat else NO_STAT for stat in stats], np.int64).reshape(-1, 4)

    def _shown(self, path: Path) -> str:
        return f"{str(self.address).rstrip('/')}/{path.as_posix()}"

    def _stat(self, path: Path) -> EntryStat:
        info = self.folder.info(path.as_posix())
        if info["type"] != "file":
            raise WrongEntryError("a folder is in its place")
        return _entry_stat(info)

    def _whole(self, path: Path) -> tuple[bytes, EntryStat]:
        state = self._stat(path)
        return self._bytes(path), state

    def _bytes(self, path: Path) -> bytes:
        return self.folder.read(path.as_posix())

    def _start(self, path: Path) -> bytes:
        return self.folder.read(path.as_posix(), DATA_START)

    def _delete(self, path: Path) -> None:
        self.folder.remove(path.as_posix())

    def _place(self, spec: EntrySpec, path: Path, raw: bytes) -> bool:
        name = path.as_posix()
        if self.folder.put_if_absent(name, raw):
            return True
        if self.folder.is_folder(name):
            aside = PurePosixPath(name).with_name(f"{path.stem}{temp_name()}{DISPLACED_SUFFIX}")
            self.folder.move_folder(name, str(aside))
        elif self.check(spec).valid:
            return False
        self.folder.put(name, raw)
        return True


def _entry_stat(info: dict[str, Any]) -> EntryStat:
    """Of what a file system says; where it tells a version, without the time: listings differ."""
    num_bytes, time_ns, _, version = stat_from_info(info)
    if version:
        return EntryStat(num_bytes, 0, 0, version)
    equal_to_none = 0 if time_ns else time.monotonic_ns()
    return EntryStat(num_bytes, time_ns, equal_to_none, 0)
