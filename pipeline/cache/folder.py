"""Files of a cache, local or remote, by name: what registrations and `latentline gc` list, read and delete.

Entries themselves are read and written by the store.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.cache.entry_format import KINDS
from pipeline.escaping import without_secrets
from pipeline.storage.addresses import Address, Url
from pipeline.storage.atomic import sync_folder, write_bytes
from pipeline.storage.remote_folder import RemoteFolder
from pipeline.storage.remote_stat import stat_from_info

_LISTED_AT_ONCE = 50_000
"""Estimated number of entries of a kind up to which they are listed together, which takes about 1 kB each.

More entries are listed in their 256 folders, one after the other."""

FileStat: TypeAlias = tuple[int, int, int, int]
"""Size, modification time, change time, and inode or number of a version; the fields of `EntryStat`."""


@dataclass(frozen=True)
class CacheFile:
    """A file of a cache.

    Attributes:
        name: Path relative to the cache, with slashes.
        num_bytes: Size of the file.
        modified_s: Modification time in seconds since 1970; None if the service does not state it.
    """

    name: str
    num_bytes: int
    modified_s: float | None


class CacheFolder(ABC):
    """Files below a cache's address, by names relative to it.

    Methods raise `OSError` if the file system refuses, and `FileNotFoundError` if a file does not exist.
    """

    def __init__(self, address: Address) -> None:
        """Use the cache at `address`."""
        self.address = address

    def where(self, name: str) -> str:
        """Return the location of a file for messages."""
        return f"{without_secrets(str(self.address)).rstrip('/')}/{name}"

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read a file."""

    @abstractmethod
    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Read the bytes of a file from `start` to `end`, exclusive; fewer if the file ends before."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Replace a file atomically."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the sorted names of the files directly in a folder; none if it does not exist."""

    @abstractmethod
    def stats(self, folder: str) -> dict[str, FileStat]:
        """Return the stat of each file directly in a folder, by name; none if it does not exist."""

    @abstractmethod
    def files(self) -> Iterator[CacheFile]:
        """Yield all files at any depth, sorted by folder and name."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file."""

    @abstractmethod
    def tidy(self, folders: Iterable[str]) -> None:
        """Delete the empty ones among these folders."""


def cache_folder(address: Address) -> CacheFolder:
    """Return the files at a recipe's `cache_dir`.

    Raises:
        StoreError: A package is missing, or the address cannot be opened.
    """
    return RemoteCacheFolder(address) if isinstance(address, Url) else LocalCacheFolder(address)


class LocalCacheFolder(CacheFolder):
    """Files of a cache on a local disk."""

    def __init__(self, root: Path) -> None:
        """Use the cache at `root`, which may not exist yet."""
        super().__init__(root)
        self._root = root

    def read(self, name: str) -> bytes:
        """See `CacheFolder.read`."""
        return (self._root / name).read_bytes()

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """See `CacheFolder.read_range`."""
        descriptor = os.open(self._root / name, os.O_RDONLY)
        try:
            data = os.pread(descriptor, end - start, start)
            while len(data) < end - start and (
                more := os.pread(descriptor, end - start - len(data), start + len(data))
            ):
                data += more  # one call returns at most 2 GiB, and less after a signal
            return data
        finally:
            os.close(descriptor)

    def replace(self, name: str, data: bytes) -> None:
        """See `CacheFolder.replace`."""
        path = self._root / name
        write_bytes(path, data)
        sync_folder(path.parent)

    def names(self, folder: str) -> list[str]:
        """See `CacheFolder.names`."""
        path = self._root / folder
        return sorted(file.name for file in path.iterdir()) if path.is_dir() else []

    def stats(self, folder: str) -> dict[str, FileStat]:
        """See `CacheFolder.stats`."""
        found: dict[str, FileStat] = {}
        with suppress(FileNotFoundError), os.scandir(self._root / folder) as files:
            for file in files:
                with suppress(FileNotFoundError):
                    if file.is_file():
                        stat = file.stat()
                        found[file.name] = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
        return found

    def files(self) -> Iterator[CacheFile]:
        """See `CacheFolder.files`; a file that is deleted meanwhile is omitted."""
        for folder, subfolders, names in os.walk(self._root):
            subfolders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    if path.is_file():
                        relative = path.relative_to(self._root).as_posix()
                        yield CacheFile(relative, stat.st_size, stat.st_mtime)

    def delete(self, name: str) -> None:
        """See `CacheFolder.delete`."""
        (self._root / name).unlink()

    def tidy(self, folders: Iterable[str]) -> None:
        """See `CacheFolder.tidy`."""
        for folder in folders:
            with suppress(OSError):  # usually because it is not empty
                (self._root / folder).rmdir()


class RemoteCacheFolder(CacheFolder):
    """Files of a cache at an fsspec address."""

    def __init__(self, url: Url, folder: RemoteFolder | None = None) -> None:
        """Open the file system, or use `folder`, the same address opened before.

        Raises:
            StoreError: A package is missing, or the address cannot be opened.
        """
        super().__init__(url)
        self._folder = RemoteFolder(url) if folder is None else folder

    def read(self, name: str) -> bytes:
        """See `CacheFolder.read`."""
        return self._folder.read(name)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """See `CacheFolder.read_range`."""
        return self._folder.read(name, end - start, start=start)

    def replace(self, name: str, data: bytes) -> None:
        """See `CacheFolder.replace`."""
        self._folder.put(name, data)

    def names(self, folder: str) -> list[str]:
        """See `CacheFolder.names`."""
        names = (name.removeprefix(f"{folder}/") for name in self._folder.list_files(folder))
        return sorted(name for name in names if "/" not in name)

    def stats(self, folder: str) -> dict[str, FileStat]:
        """See `CacheFolder.stats`."""
        infos = self._folder.list_files(folder).items()
        named = ((name.removeprefix(f"{folder}/"), info) for name, info in infos)
        return {name: remote_file_stat(info) for name, info in named if "/" not in name}

    def files(self) -> Iterator[CacheFile]:
        """See `CacheFolder.files`; only one listing is in memory if the service can list parts of a cache."""
        if self._folder.lists_prefixes:
            yield from self._files_by_folder("")
        else:
            yield from _sorted_files(self._folder.list_files())

    def _files_by_folder(self, folder: str) -> Iterator[CacheFile]:
        for name, info in self._folder.list_level(folder):
            if info["type"] == "file":
                yield _cache_file(name, info)
            elif name in KINDS and self._has_many_entries(name):
                yield from self._files_by_folder(name)
            elif info["type"] == "directory":
                yield from _sorted_files(self._folder.list_files(name))

    def _has_many_entries(self, kind: str) -> bool:
        """Estimate from one of 256 folders whether a kind has too many entries for one listing."""
        sample = self._folder.list_files(kind, prefix="00/")
        return 256 * len(sample) > _LISTED_AT_ONCE

    def delete(self, name: str) -> None:
        """See `CacheFolder.delete`."""
        self._folder.remove(name)

    def tidy(self, folders: Iterable[str]) -> None:
        """Do nothing: object stores cannot hold empty folders, and on other systems they are harmless."""


def _sorted_files(infos: Mapping[str, Mapping[str, Any]]) -> Iterator[CacheFile]:
    for name in sorted(infos):
        yield _cache_file(name, infos[name])


def _cache_file(name: str, info: Mapping[str, Any]) -> CacheFile:
    num_bytes, time_ns, _, _ = stat_from_info(info)
    return CacheFile(name, num_bytes, time_ns / 1e9 if time_ns else None)


def remote_file_stat(info: Mapping[str, Any]) -> FileStat:
    """Convert fsspec's info; if it states a version, omit the time, which differs between listings."""
    num_bytes, time_ns, _, version = stat_from_info(info)
    if version:
        return num_bytes, 0, 0, version

    # Without version and time, make the stat unequal to any recorded one, so that the file is read.
    unique = 0 if time_ns else time.monotonic_ns()
    return num_bytes, time_ns, unique, 0
