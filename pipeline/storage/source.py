"""Where a dataset's files are read from: a folder of this machine, or whatever fsspec opens.

Both are one `Source`, whose files are named by paths relative to it, with slashes. A file's stat is four
numbers, of which any differs once the file is another. What fsspec tells of a file's version takes the place
of an inode; where it tells nothing but a size, the file is read each time.
"""

from __future__ import annotations

import io
import os
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.storage.addresses import Address

Stat = tuple[int, int, int, int]
"""Size in bytes, modification time and change time in nanoseconds, and inode; of a remote file 0 for a time
that is not known, and in place of the inode a number that stands for its version, or for its source where
that tells none."""

Opened: TypeAlias = io.BufferedReader | io.BytesIO

NO_FILE: Stat = (-1, -1, -1, -1)


class UnreachableError(OSError):
    """A remote file that could not be read, though it may be there."""


class SourceFile(NamedTuple):
    """One file of a source; as of a path, its text is what messages name."""

    source: Source
    path: str

    def read_bytes(self) -> bytes:
        """The whole file.

        Raises:
            OSError: It cannot be read.
        """
        return self.source.read(self.path)

    def __str__(self) -> str:
        return self.source.where(self.path)


class Source(ABC):
    """Files that are only ever read.

    Attributes:
        address: Of the folder that paths are relative to.
        threads: How many may read at a time; None for one a core.
        compared_columns: Columns of a stat by which a change between two stages is told.
    """

    threads: int | None = None
    compared_columns: tuple[int, ...] = (0, 1)

    def __init__(self, address: Address) -> None:
        """Nothing is opened yet."""
        self.address = address

    def where(self, path: str) -> str:
        """The file as messages name it."""
        return f"{self.address}/{path}"

    @abstractmethod
    def open(self, path: str, num_bytes: int = 0) -> Opened:
        """The file opened for reading, at once, even where a pipe has taken its place.

        Args:
            path: Of the file.
            num_bytes: Its size as far as known; a remote one is read as a whole up to `MAX_WHOLE_BYTES`.

        Raises:
            OSError: It cannot be opened.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The whole file.

        Raises:
            OSError: It cannot be read.
        """

    @abstractmethod
    def stat_open(self, file: Opened, listed: Stat) -> Stat | None:
        """The stat of a file that `open` gave; None where it is no regular file.

        Args:
            file: As opened.
            listed: Its stat when it was listed.
        """

    @abstractmethod
    def stats(self, paths: Sequence[str]) -> npt.NDArray[np.int64]:
        """The stat of each file, int64 (N, 4); that of what is not there is `NO_FILE`.

        Raises:
            DatasetError: A remote folder cannot be listed, for another reason than that it is not there.
        """

    @abstractmethod
    def sibling_names(self, path: str) -> list[str]:
        """Names in the folder that the file at `path` lies in; none where it cannot be listed."""

    def file(self, path: str) -> Path | SourceFile:
        """One file, to be read later."""
        return SourceFile(self, path)


class LocalSource(Source):
    """A folder of this machine."""

    def open(self, path: str, num_bytes: int = 0) -> Opened:
        """As `Source.open`."""
        del num_bytes
        return open_nonblocking(f"{self.address}/{path}")

    def read(self, path: str) -> bytes:
        """As `Source.read`."""
        return Path(self.address, path).read_bytes()

    def stat_open(self, file: Opened, listed: Stat) -> Stat | None:
        """As `Source.stat_open`: what the system says of it now."""
        del listed
        stat = os.fstat(file.fileno())
        if not S_ISREG(stat.st_mode):
            return None
        return (stat.st_size, to_int64(stat.st_mtime_ns), to_int64(stat.st_ctime_ns), to_int64(stat.st_ino))

    def file(self, path: str) -> Path:
        """As `Source.file`."""
        return Path(self.address, path)

    def stats(self, paths: Sequence[str]) -> npt.NDArray[np.int64]:
        """As `Source.stats`; links are followed."""
        root = str(self.address)
        return stat_columns([_stat_or_none(f"{root}/{path}") for path in paths])

    def sibling_names(self, path: str) -> list[str]:
        """As `Source.sibling_names`."""
        try:
            return os.listdir(posixpath.dirname(f"{self.address}/{path}"))  # noqa: PTH208 - names are all
        except OSError:
            return []


def threads_for(sources: Iterable[Source]) -> int | None:
    """How many threads may read from all of them; None for one a core."""
    return max((source.threads for source in sources if source.threads), default=None)


def open_nonblocking(path: str) -> io.BufferedReader:
    """The file opened for reading in binary, at once, even where a FIFO has taken its place meanwhile.

    Raises:
        OSError: It cannot be opened.
    """
    return open(path, "rb", opener=_opener)


def to_int64(number: int) -> int:
    """A number of a stat as the tables hold it, in 63 bits and a sign.

    Some file systems use all 64 for inodes; and nanoseconds take more in 2262, which a file may be dated.
    """
    return number if -(2**63) <= number < 2**63 else (number + 2**63) % 2**64 - 2**63


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def stat_columns(stats: Sequence[Stat]) -> npt.NDArray[np.int64]:
    """Stats as int64 (N, 4), each number as `to_int64` has it."""
    try:
        return np.array(stats, dtype=np.int64).reshape(-1, 4)
    except OverflowError:
        return np.array([list(map(to_int64, stat)) for stat in stats], dtype=np.int64)


def _stat_or_none(path: str) -> Stat:
    try:
        stat = os.stat(path)  # noqa: PTH116 - a hundred thousand times, and without making a Path
    except OSError:
        return NO_FILE
    return (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
