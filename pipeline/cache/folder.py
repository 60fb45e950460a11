"""A cache's files that are no entries, and the list of all: on this machine, or where fsspec finds them.

The store itself reads and writes entries; the registrations and `latentline gc` ask here.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.storage.addresses import Address, Url
from pipeline.storage.atomic import write_bytes
from pipeline.storage.remote_folder import RemoteFolder, stat_from_info


@dataclass(frozen=True)
class CacheFile:
    """A file of a cache.

    Attributes:
        name: Its place below the cache, with slashes.
        num_bytes: Its size.
        modified_s: Since 1970; None where nobody says.
    """

    name: str
    num_bytes: int
    modified_s: float | None


class CacheFolder(ABC):
    """Files below a cache's address, by names relative to it.

    Every method raises `OSError` where it is refused, `FileNotFoundError` where there is no such file.
    """

    def __init__(self, address: Address) -> None:
        """Nothing is opened yet."""
        self.address = address

    def where(self, name: str) -> str:
        """The file as messages name it."""
        return f"{str(self.address).rstrip('/')}/{name}"

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The file's bytes."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Let the file have these bytes; a reader sees the old ones or the new ones."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Of the files directly in a folder, sorted; none where there is no such folder."""

    @abstractmethod
    def files(self) -> Iterator[CacheFile]:
        """Every file at any depth, sorted by folder and name."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file."""

    @abstractmethod
    def tidy(self, folders: Iterable[str]) -> None:
        """Delete those of the folders that are empty, where there are such things."""


def cache_folder(address: Address) -> CacheFolder:
    """The files at a recipe's `cache_dir`.

    Raises:
        StoreError: A package is missing, or the address cannot be opened.
    """
    return RemoteCacheFolder(address) if isinstance(address, Url) else LocalCacheFolder(address)


class LocalCacheFolder(CacheFolder):
    """On this machine."""

    def __init__(self, root: Path) -> None:
        """Nothing is read or made yet."""
        super().__init__(root)
        self._root = root

    def read(self, name: str) -> bytes:
        """As `CacheFolder.read`."""
        return (self._root / name).read_bytes()

    def replace(self, name: str, data: bytes) -> None:
        """As `CacheFolder.replace`."""
        write_bytes(self._root / name, data)

    def names(self, folder: str) -> list[str]:
        """As `CacheFolder.names`."""
        found = self._root / folder
        return sorted(path.name for path in found.iterdir()) if found.is_dir() else []

    def files(self) -> Iterator[CacheFile]:
        """As `CacheFolder.files`; what vanishes meanwhile is left out."""
        for folder, below, names in os.walk(self._root):
            below.sort()
            for name in sorted(names):
                path = Path(folder, name)
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    if path.is_file():
                        place = path.relative_to(self._root).as_posix()
                        yield CacheFile(place, stat.st_size, stat.st_mtime)

    def delete(self, name: str) -> None:
        """As `CacheFolder.delete`."""
        (self._root / name).unlink()

    def tidy(self, folders: Iterable[str]) -> None:
        """As `CacheFolder.tidy`."""
        for folder in folders:
            with suppress(OSError):  # not empty, most often
                (self._root / folder).rmdir()


class RemoteCacheFolder(CacheFolder):
    """At an address that fsspec opens."""

    def __init__(self, url: Url) -> None:
        """Open its file system.

        Raises:
            StoreError: A package is missing, or the address cannot be opened.
        """
        super().__init__(url)
        self._folder = RemoteFolder(url)

    def read(self, name: str) -> bytes:
        """As `CacheFolder.read`."""
        return self._folder.read(name)

    def replace(self, name: str, data: bytes) -> None:
        """As `CacheFolder.replace`."""
        self._folder.put(name, data)

    def names(self, folder: str) -> list[str]:
        """As `CacheFolder.names`."""
        found = (name.removeprefix(f"{folder}/") for name in self._folder.list_files(folder))
        return sorted(name for name in found if "/" not in name)

    def files(self) -> Iterator[CacheFile]:
        """As `CacheFolder.files`."""
        for name, info in sorted(self._folder.list_files().items()):
            num_bytes, time_ns, _, _ = stat_from_info(info)
            yield CacheFile(name, num_bytes, time_ns / 1e9 if time_ns else None)

    def delete(self, name: str) -> None:
        """As `CacheFolder.delete`."""
        self._folder.remove(name)

    def tidy(self, folders: Iterable[str]) -> None:
        """Nothing: folders that hold nothing are not there, or in nobody's way."""
