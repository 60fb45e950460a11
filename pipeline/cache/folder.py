"""Files of a cache by name: the interface that each backend implements.

    <kind>/<first two digits of key>/<key>.safetensors      file of one entry, see `entry_format`
    packs/<kind>/<sha256>.pack                              packs of entries, see `packs`

`local_folder` implements it for a disk and `fsspec_folder` for an address. `backends` chooses between them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.cache.entry_format import Kind
from pipeline.escaping import without_secrets
from pipeline.storage.addresses import Address

SUFFIX = ".safetensors"
"""Suffix of an entry's file."""

DISPLACED_SUFFIX = ".displaced"
"""Suffix of a folder that was found at an entry's path; it is renamed, never deleted."""

FileStat: TypeAlias = tuple[int, int, int, int]
"""Size, modification time, change time, and inode or number of a version; the fields of `EntryStat`."""

NO_STAT: FileStat = (0, 0, 0, 0)
"""Stat of a file that does not exist."""


class NotAFileError(OSError):
    """The name belongs to a folder or a special file."""


@dataclass(frozen=True)
class CacheFile:
    """A file of a cache.

    Attributes:
        name: Path relative to the cache, with slashes.
        num_bytes: Size of the file.
        modified_s: Modification time in seconds since 1970; None if the service does not report it.
    """

    name: str
    num_bytes: int
    modified_s: float | None


def entry_name(kind: Kind, key: str) -> str:
    """Return the name of an entry's file."""
    # A format string takes a fifth of the time of joining paths.
    return f"{kind}/{key[:2]}/{key}{SUFFIX}"


class CacheFolder(ABC):
    """Files below a cache's address, by names relative to it.

    Methods raise `OSError` if the file system refuses, and `FileNotFoundError` if a file does not exist.

    Attributes:
        address: Address of the cache.
        threads: Number of entries to check or write at the same time.
        readers: Number of threads that keep up with training.
        fix: Suggested fix if a file cannot be read or written.
        reads_packs_first: Whether an entry in a pack is read before its single file is tried.
    """

    threads: ClassVar[int]
    readers: ClassVar[int]
    fix: ClassVar[str]
    reads_packs_first: ClassVar[bool]

    def __init__(self, address: Address) -> None:
        self.address = address

    def where(self, name: str) -> str:
        """Return the location of a file for messages."""
        return f"{without_secrets(str(self.address)).rstrip('/')}/{name}"

    @abstractmethod
    def stat(self, name: str) -> FileStat:
        """Return the stat of a file; raises `NotAFileError` if the name belongs to something else."""

    @abstractmethod
    def entry_stats(self, kind: Kind, keys: Collection[str]) -> npt.NDArray[np.int64]:
        """Return the stats of many entries' files as int64 (N, 4), in the order of `keys`.

        A row is `NO_STAT` if there is no regular file. Files are not opened.
        """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read a file; may raise as `stat`."""

    @abstractmethod
    def read_with_stat(self, name: str) -> tuple[bytes, FileStat]:
        """Read a file, and return its stat from before; raises as `stat`."""

    @abstractmethod
    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Read the bytes of a file from `start` to `end`, exclusive; fewer if the file ends before."""

    @abstractmethod
    def create(self, name: str, data: bytes, is_valid: Callable[[bytes], bool]) -> bool:
        """Write a file unless a valid one exists: the first valid file wins.

        A folder at its path is renamed, and any other file that `is_valid` rejects is replaced. Returns True
        if this call's file is in place.
        """

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Replace a file atomically."""

    @abstractmethod
    def download(self, name: str, path: Path) -> None:
        """Write the content of a file to a local path, which is not replaced atomically."""

    @abstractmethod
    def files_in(self, folder: str) -> list[CacheFile]:
        """Return the files directly in a folder, named without it; none if it does not exist."""

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
