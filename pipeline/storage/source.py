"""Sources: the folders that datasets are read from; `remote_source` has the sources at an address.

Files are named by paths relative to the source's address, with slashes. A file's stat is four numbers. At
least one of them changes whenever the file does.
"""

from __future__ import annotations

import io
import os
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.escaping import without_secrets
from pipeline.storage.addresses import Address
from pipeline.storage.regular_files import (
    IMAGE_LINK_FIX,
    MAX_FILE_BYTES,
    InsideFolder,
    open_regular,
    read_all,
)

Stat = tuple[int, int, int, int]
"""Size in bytes, modification time and change time in nanoseconds, and inode. A remote file has 0 for an
unknown time, and instead of an inode a hash of its version, or of its source if it has no version."""

NO_FILE: Stat = (-1, -1, -1, -1)
"""Stat of a file that does not exist."""

Opened: TypeAlias = io.BufferedReader | io.BytesIO
"""A file opened for reading in binary."""

DATASET_KEY = "datasets[].path"
"""Recipe key of a source that messages name unless it has another one."""

MAX_BUFFERED_BYTES = 64_000_000
"""Size up to which an opened remote file is read into memory at once."""


# A larger file is no caption, and would fill memory and table.
MAX_TEXT_BYTES = 1_000_000
"""Maximum size of a text that belongs to an image, such as its caption."""


class SourceFile(NamedTuple):
    """One file of a source; its `str` is its name in messages."""

    source: Source
    path: str

    def open(self, num_bytes: int = 0) -> Opened:
        """Open the file; see `Source.open`."""
        return self.source.open(self.path, num_bytes)

    def read_bytes(self) -> bytes:
        """Return the file's bytes; see `Source.read`."""
        return self.source.read(self.path)

    def __str__(self) -> str:
        return self.source.where(self.path)


class Source(ABC):
    """Files below one address, opened only for reading, and only regular files of bounded size.

    Attributes:
        address: Address of the folder that paths are relative to.
        max_file_bytes: Size above which a file is refused.
        key: Recipe key of the address, for messages.
        threads: Number of threads that may read at a time; None for one per core.
        compared_columns: Columns of a stat that are compared to detect a change between two stages.
    """

    threads: int | None = None
    compared_columns: tuple[int, ...] = (0, 1)

    def __init__(
        self, address: Address, *, max_file_bytes: int = MAX_FILE_BYTES, key: str = DATASET_KEY
    ) -> None:
        self.address = address
        self.max_file_bytes = max_file_bytes
        self.key = key

    def where(self, path: str) -> str:
        """Return the name of a file as messages show it."""
        return f"{without_secrets(str(self.address))}/{path}"

    @abstractmethod
    def open(self, path: str, num_bytes: int = 0) -> Opened:
        """Open an image for reading without blocking, even if it has been replaced by a FIFO.

        The path may be a link to a file outside the source. `num_bytes` is the size of the file, if known. A
        remote file up to `MAX_BUFFERED_BYTES` is read at once.

        Raises:
            RefusedFileError: It is not a regular file, or it is larger than `max_file_bytes`.
            OSError: The file cannot be opened.
        """

    @abstractmethod
    def open_text(self, path: str, num_bytes: int = 0) -> Opened:
        """Open a file that belongs to an image, such as its caption, like `open`.

        Raises:
            RefusedFileError: See `open`, or the file is outside the source.
            OSError: The file cannot be opened.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the bytes of an image; raises as `open`."""

    @abstractmethod
    def stat_open(self, file: Opened, listed: Stat) -> Stat:
        """Return the stat of a file that `open` returned; `listed` is its stat when it was listed."""

    @abstractmethod
    def stats(self, paths: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the stats of several files as int64 (N, 4); a missing file has `NO_FILE`.

        Raises:
            DatasetError: A remote folder exists but cannot be listed.
        """

    @abstractmethod
    def sibling_names(self, path: str) -> list[str]:
        """Return the names in the folder of the file at `path`; none if it cannot be listed."""

    def file(self, path: str) -> SourceFile:
        """Return one file without opening it."""
        return SourceFile(self, path)


class LocalSource(Source):
    """A folder on this machine.

    Attributes:
        links_out: Paths of links to files and folders outside the folder that `open` may follow. With None,
            it follows any link, so the content must be compared with a recorded hash.
    """

    def __init__(
        self,
        address: Path,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        follow_links: bool = False,
        key: str = DATASET_KEY,
    ) -> None:
        """Store the address without opening it; with `follow_links`, texts may be outside the folder."""
        super().__init__(address, max_file_bytes=max_file_bytes, key=key)
        self.links_out: Collection[str] | None = None
        self._inside = InsideFolder(address)
        self._follow_links = follow_links

    def open(self, path: str, num_bytes: int = 0) -> io.BufferedReader:
        """See `Source.open`."""
        del num_bytes
        if self.links_out is None or _passes(path, self.links_out):
            return self._open_anywhere(path)
        return self._inside.open(path, max_bytes=self.max_file_bytes, fix=IMAGE_LINK_FIX)

    def open_text(self, path: str, num_bytes: int = 0) -> io.BufferedReader:
        """See `Source.open_text`."""
        del num_bytes
        if self._follow_links:
            return self._open_anywhere(path)

        # The text is published with the LoRA, so a link must not lead to any file of the user.
        return self._inside.open(path, max_bytes=self.max_file_bytes)

    def _open_anywhere(self, path: str) -> io.BufferedReader:
        return open_regular(f"{self.address}/{path}", max_bytes=self.max_file_bytes)

    def read(self, path: str) -> bytes:
        """See `Source.read`."""
        with self.open(path) as file:
            return read_all(file)

    def stat_open(self, file: Opened, listed: Stat) -> Stat:
        """See `Source.stat_open`."""
        del listed
        stat = os.fstat(file.fileno())
        return (stat.st_size, to_int64(stat.st_mtime_ns), to_int64(stat.st_ctime_ns), to_int64(stat.st_ino))

    def stats(self, paths: Sequence[str]) -> npt.NDArray[np.int64]:
        """See `Source.stats`."""
        # Links are followed, as in `open`.
        root = str(self.address)
        return stat_array([_stat_or_none(f"{root}/{path}") for path in paths])

    def sibling_names(self, path: str) -> list[str]:
        """See `Source.sibling_names`."""
        try:
            return [entry.name for entry in Path(self.address, posixpath.dirname(path)).iterdir()]
        except OSError:
            return []


def _passes(path: str, links: Collection[str]) -> bool:
    """Return whether a path is one of the links, or leads through one."""
    return bool(links) and (
        path in links or any(path[:end] in links for end, letter in enumerate(path) if letter == "/")
    )


def threads_for(sources: Iterable[Source]) -> int | None:
    """Return the number of threads that may read from several sources; None for one per core."""
    return max((source.threads for source in sources if source.threads), default=None)


def to_int64(number: int) -> int:
    """Wrap a number of a stat into the int64 range of the tables."""
    # Some file systems use inodes of 64 bits, and a file may be dated after 2262, when nanoseconds overflow.
    return number if -(2**63) <= number < 2**63 else (number + 2**63) % 2**64 - 2**63


def stat_array(stats: Sequence[Stat]) -> npt.NDArray[np.int64]:
    """Return stats as int64 (N, 4), wrapped by `to_int64`."""
    try:
        return np.array(stats, dtype=np.int64).reshape(-1, 4)
    except OverflowError:
        return np.array([list(map(to_int64, stat)) for stat in stats], dtype=np.int64)


def _stat_or_none(path: str) -> Stat:
    try:
        stat = os.stat(path)  # noqa: PTH116 - runs for each image of a dataset; a Path would double its time
    except OSError:
        return NO_FILE
    return (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
