"""A cache at an address that fsspec opens: an object store, another host's disk, memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.cache.entry_format import KINDS, Kind
from pipeline.cache.folder import (
    DISPLACED_SUFFIX,
    NO_STAT,
    CacheFile,
    CacheFolder,
    FileStat,
    NotAFileError,
    entry_name,
)
from pipeline.storage.addresses import Url
from pipeline.storage.atomic import temp_name
from pipeline.storage.file_systems import stat_from_info
from pipeline.storage.remote_folder import ACCESS_FIX, NoConditionalWritesError, RemoteFolder

_MAX_SINGLE_REQUESTS = 32
"""Number of entries that are always stat one by one."""

_LISTED_TOGETHER = 2_500
"""Estimated number of entries that one listing returns at most, when the stats of entries are listed."""

# With `_LISTED_TOGETHER`, it bounds the memory to about 45 MB. More threads save no time, because they wait
# for the interpreter.
_LISTING_THREADS = 4
"""Number of concurrent listings."""

# Measured with s3fs and Ceph's gateway on one machine: a listed entry takes 0.30 ms in this process and 0.04
# ms in the service, a request 4.1 and 2.7 ms, and a request for a missing entry 5.8 and 5.7 ms.
_ENTRIES_PER_REQUEST = 16
"""Number of listed entries that take as much processor time as a request for one entry."""

_MIN_SAMPLED = 16
"""Number of listed entries from which the number of all entries is estimated, with an error of about 25%."""

_MAX_PREFIX_DIGITS = 4
"""Largest number of digits of a key by which entries are listed."""

_FOLDER_DIGITS = 2
"""Number of digits of a key that name its folder."""

_LISTED_AT_ONCE = 50_000
"""Estimated number of entries of a kind up to which `files` lists them together, which takes 1 kB each.

More entries are listed in their 256 folders, one at a time."""


class FsspecFolder(CacheFolder):
    """Files of a cache at an fsspec address.

    A file's stat has a number for its version in place of an inode. Without a version it is the size and the
    modification time. An entry with neither is read by each run.
    """

    threads = 16
    readers = 8
    fix = ACCESS_FIX
    reads_packs_first = True

    def __init__(self, url: Url, remote: RemoteFolder | None = None) -> None:
        """Open the file system without reading from it, or use `remote`, the same address opened before.

        Raises:
            StoreError: A package is missing, or the address cannot be opened.
        """
        super().__init__(url)
        self._url = url
        self.remote = RemoteFolder(url) if remote is None else remote

    @cached_property
    def _downloads(self) -> RemoteFolder:
        # SFTP and SMB send one request per connection at a time, and a download may take minutes.
        return RemoteFolder(self._url)

    def stat(self, name: str) -> FileStat:
        """See `CacheFolder.stat`."""
        info = self.remote.info(name)
        if info["type"] != "file":
            raise NotAFileError("its path must be a regular file, got a folder")
        return _file_stat(info)

    def entry_stats(self, kind: Kind, keys: Collection[str]) -> npt.NDArray[np.int64]:
        """See `CacheFolder.entry_stats`."""
        names = [entry_name(kind, key) for key in keys]

        # Few entries are stat one by one, and so are entries that are a small part of a large cache.
        # Otherwise all entries with the same first digits of the key are listed together.
        listings = self._listings(kind, names)
        found: dict[str, FileStat] = {}
        if listings:
            # Other listed entries are dropped at once, so that memory does not grow with their number.
            wanted = set(names)
            with ThreadPoolExecutor(_LISTING_THREADS) as pool:
                for listed in pool.map(lambda each: self._listed(each[0], each[1], wanted), listings):
                    found |= listed
        else:
            with ThreadPoolExecutor(self.threads) as pool:
                stats = zip(names, pool.map(self._stat_or_none, names), strict=True)
                found = {name: stat for name, stat in stats if stat is not None}
        return np.array([found.get(name, NO_STAT) for name in names], np.int64).reshape(-1, 4)

    def _listings(self, kind: str, names: Sequence[str]) -> list[tuple[str, str]]:
        """Return folder and prefix of the listings that take least time; none if single requests do."""
        if len(names) <= _MAX_SINGLE_REQUESTS:
            return []

        num_entries = self._estimate(names[0])
        lengths = range(_MAX_PREFIX_DIGITS + 1) if self.remote.lists_prefixes else (0, _FOLDER_DIGITS)
        fits = (digits for digits in lengths if num_entries / 16**digits <= _LISTED_TOGETHER)
        num_digits = next(fits, lengths[-1])

        prefixes = sorted({PurePosixPath(name).name[:num_digits] for name in names})
        num_listed = num_entries * len(prefixes) / 16**num_digits
        if num_listed > len(names) * _ENTRIES_PER_REQUEST:
            return []
        if num_digits < _FOLDER_DIGITS:
            return [(kind, prefix) for prefix in prefixes]
        return [(f"{kind}/{prefix[:_FOLDER_DIGITS]}", prefix) for prefix in prefixes]

    def _estimate(self, name: str) -> int:
        """Estimate the number of entries of a kind."""
        # Keys are hashes, so the entries with the same first digits as one key are a fair sample.
        folder, _, file = name.rpartition("/")
        num_digits = num_listed = 0
        # A prefix of four digits selects 150 of 10 million entries, and hardly any of a small cache.
        longest = _MAX_PREFIX_DIGITS if self.remote.lists_prefixes else _FOLDER_DIGITS
        for num_digits in range(longest, _FOLDER_DIGITS - 1, -1):
            num_listed = len(self.remote.list_files(folder, prefix=file[:num_digits]))
            if num_listed >= _MIN_SAMPLED:
                break
        return num_listed * 16**num_digits

    def _listed(self, folder: str, prefix: str, wanted: Container[str]) -> dict[str, FileStat]:
        listed = self.remote.list_files(folder, prefix=prefix)
        return {name: _file_stat(info) for name, info in listed.items() if name in wanted}

    def _stat_or_none(self, name: str) -> FileStat | None:
        try:
            return self.stat(name)
        except (FileNotFoundError, NotAFileError):
            return None

    def read(self, name: str) -> bytes:
        """See `CacheFolder.read`."""
        return self.remote.read(name)

    def read_with_stat(self, name: str) -> tuple[bytes, FileStat]:
        """See `CacheFolder.read_with_stat`."""
        # The stat comes first: if the file is replaced before it is read, its later stat differs from the
        # recorded one, and the file is read again.
        stat = self.stat(name)
        return self.remote.read(name), stat

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """See `CacheFolder.read_range`."""
        return self.remote.read(name, end - start, start=start)

    def create(self, name: str, data: bytes, is_valid: Callable[[bytes], bool]) -> bool:
        """See `CacheFolder.create`."""
        # With conditional writes (S3, Google Cloud Storage), the first of several writers wins, as on a local
        # disk. Without them, a later writer may replace the entry of an earlier one, and both are valid.
        with suppress(NoConditionalWritesError):
            if self.remote.put_if_absent(name, data):
                return True

        if self.remote.is_folder(name):
            path = PurePosixPath(name)
            self.remote.move_folder(name, str(path.with_name(f"{path.stem}{temp_name()}{DISPLACED_SUFFIX}")))
        else:
            try:
                if is_valid(self.remote.read(name)):
                    return False
            except FileNotFoundError:
                pass
        self.remote.put(name, data)
        return True

    def replace(self, name: str, data: bytes) -> None:
        """See `CacheFolder.replace`."""
        self.remote.put(name, data)

    def download(self, name: str, path: Path) -> None:
        """See `CacheFolder.download`."""
        self._downloads.download(name, path)

    def files_in(self, folder: str) -> list[CacheFile]:
        """See `CacheFolder.files_in`."""
        infos = self.remote.list_files(folder).items()
        named = ((name.removeprefix(f"{folder}/"), info) for name, info in infos)
        return [_cache_file(name, info) for name, info in named if "/" not in name]

    def stats(self, folder: str) -> dict[str, FileStat]:
        """See `CacheFolder.stats`."""
        infos = self.remote.list_files(folder).items()
        named = ((name.removeprefix(f"{folder}/"), info) for name, info in infos)
        return {name: _file_stat(info) for name, info in named if "/" not in name}

    def files(self) -> Iterator[CacheFile]:
        """See `CacheFolder.files`."""
        # A cache may have millions of entries, so only one listing is in memory if the service can list
        # parts.
        if self.remote.lists_prefixes:
            yield from self._files_by_folder("")
        else:
            yield from _sorted_files(self.remote.list_files())

    def _files_by_folder(self, folder: str) -> Iterator[CacheFile]:
        for name, info in self.remote.list_level(folder):
            if info["type"] == "file":
                yield _cache_file(name, info)
            elif name in KINDS and self._has_many_entries(name):
                yield from self._files_by_folder(name)
            elif info["type"] == "directory":
                yield from _sorted_files(self.remote.list_files(name))

    def _has_many_entries(self, kind: str) -> bool:
        # Keys are hashes, so one of the 256 folders represents all of them.
        sample = self.remote.list_files(kind, prefix="00/")
        return 256 * len(sample) > _LISTED_AT_ONCE

    def delete(self, name: str) -> None:
        """See `CacheFolder.delete`."""
        self.remote.remove(name)

    def tidy(self, folders: Iterable[str]) -> None:
        """Do nothing."""
        # Object stores cannot hold empty folders, and on other systems they are harmless.


def _sorted_files(infos: Mapping[str, Mapping[str, Any]]) -> Iterator[CacheFile]:
    for name in sorted(infos):
        yield _cache_file(name, infos[name])


def _cache_file(name: str, info: Mapping[str, Any]) -> CacheFile:
    num_bytes, time_ns, _, _ = stat_from_info(info)
    return CacheFile(name, num_bytes, time_ns / 1e9 if time_ns else None)


def _file_stat(info: Mapping[str, Any]) -> FileStat:
    num_bytes, time_ns, _, version = stat_from_info(info)

    # The time differs between listings, so it is omitted where there is a version.
    if version:
        return num_bytes, 0, 0, version

    # Without version and time, make the stat unequal to any recorded one, so that the file is read.
    unique = 0 if time_ns else time.monotonic_ns()
    return num_bytes, time_ns, unique, 0
