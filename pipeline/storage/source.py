"""Sources: the folders that datasets are read from, on this machine or behind an fsspec address.

`source_at` returns the `Source` of an address. Files are named by paths relative to it, with slashes. A
file's stat is four numbers, at least one of which changes whenever the file does.
"""

from __future__ import annotations

import io
import os
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.errors import DatasetError
from pipeline.escaping import without_secrets
from pipeline.storage.addresses import Address, Url
from pipeline.storage.http_client import RedirectRefusedError
from pipeline.storage.regular_files import (
    MAX_FILE_BYTES,
    InsideCheck,
    RefusedFileError,
    open_regular,
    read_all,
    require_size,
)
from pipeline.storage.remote_folder import (
    as_os_error,
    join_path,
    open_url,
    request_lock,
    stat_from_info,
    text_number,
    unreadable_error,
)

Stat = tuple[int, int, int, int]
"""Size in bytes, modification time and change time in nanoseconds, and inode. A remote file has 0 for an
unknown time, and instead of an inode a hash of its version, or of its source if it has no version."""

NO_FILE: Stat = (-1, -1, -1, -1)
"""Stat of a file that does not exist."""

Opened: TypeAlias = io.BufferedReader | io.BytesIO
"""A file opened for reading in binary."""

REMOTE_THREADS = 16
"""Number of concurrent requests to a remote source; each mostly waits for the server."""

MAX_BUFFERED_BYTES = 64_000_000
"""Size up to which an opened remote file is read into memory at once."""


class SourceFile(NamedTuple):
    """One file of a source; its `str` is its name in messages."""

    source: Source
    path: str

    def open(self, num_bytes: int = 0) -> Opened:
        """Open the file; see `Source.open`."""
        return self.source.open(self.path, num_bytes)

    def read_bytes(self) -> bytes:
        """Return the file's bytes.

        Raises:
            OSError: The file cannot be read.
        """
        return self.source.read(self.path)

    def __str__(self) -> str:
        return self.source.where(self.path)


class Source(ABC):
    """Files below one address, opened only for reading, and only regular files of bounded size.

    Attributes:
        address: Address of the folder that paths are relative to.
        max_file_bytes: Size above which a file is refused.
        threads: Number of threads that may read at a time; None for one per core.
        compared_columns: Columns of a stat that are compared to detect a change between two stages.
    """

    threads: int | None = None
    compared_columns: tuple[int, ...] = (0, 1)

    def __init__(self, address: Address, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Store the address without opening it."""
        self.address = address
        self.max_file_bytes = max_file_bytes

    def where(self, path: str) -> str:
        """Return the name of a file as messages show it."""
        return f"{without_secrets(str(self.address))}/{path}"

    @abstractmethod
    def open(self, path: str, num_bytes: int = 0) -> Opened:
        """Open an image for reading without blocking, even if it has been replaced by a FIFO.

        Args:
            path: Path of the file. It may be a link to a file outside the source.
            num_bytes: Size of the file, if known. A remote file up to `MAX_BUFFERED_BYTES` is read at once.

        Raises:
            RefusedFileError: It is not a regular file, or it is larger than `max_file_bytes`.
            OSError: The file cannot be opened.
        """

    @abstractmethod
    def open_text(self, path: str, num_bytes: int = 0) -> Opened:
        """Open a file that belongs to an image, such as its caption, like `open`.

        The text in it is published with the LoRA, so a link to a file outside the source is refused.

        Raises:
            RefusedFileError: See `open`, or the file is outside the source.
            OSError: The file cannot be opened.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the bytes of an image.

        Raises:
            RefusedFileError: See `open`.
            OSError: The file cannot be read.
        """

    @abstractmethod
    def stat_open(self, file: Opened, listed: Stat) -> Stat:
        """Return the stat of an opened file.

        Args:
            file: File returned by `open`.
            listed: Stat of the file when it was listed.
        """

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
    """A folder on this machine."""

    def __init__(
        self, address: Path, *, max_file_bytes: int = MAX_FILE_BYTES, follow_links: bool = False
    ) -> None:
        """Store the address without opening it; with `follow_links`, texts may be outside the folder."""
        super().__init__(address, max_file_bytes=max_file_bytes)
        self._inside = None if follow_links else InsideCheck(address)

    def open(self, path: str, num_bytes: int = 0) -> io.BufferedReader:
        """See `Source.open`."""
        del num_bytes
        return open_regular(f"{self.address}/{path}", max_bytes=self.max_file_bytes)

    def open_text(self, path: str, num_bytes: int = 0) -> io.BufferedReader:
        """See `Source.open_text`."""
        if self._inside is None:
            return self.open(path, num_bytes)
        return self._inside.open(f"{self.address}/{path}", max_bytes=self.max_file_bytes)

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
        """See `Source.stats`. Links are followed."""
        root = str(self.address)
        return _stat_array([_stat_or_none(f"{root}/{path}") for path in paths])

    def sibling_names(self, path: str) -> list[str]:
        """See `Source.sibling_names`."""
        try:
            return [entry.name for entry in Path(self.address, posixpath.dirname(path)).iterdir()]
        except OSError:
            return []


class ListedPath(NamedTuple):
    """One item of a remote folder.

    Attributes:
        path: Path below the source.
        stat: Stat of a file; None for a folder or a special item.
        is_special: True for an item that is neither a file nor a folder, or whose name cannot be used.
    """

    path: str
    stat: Stat | None
    is_special: bool = False


class RemoteSource(Source):
    """A folder on a file system opened by fsspec: an object store, an archive or a web server."""

    threads = REMOTE_THREADS
    compared_columns = (0, 1, 3)

    def __init__(self, url: Url, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Open the file system.

        Raises:
            DatasetError: A package is missing, or the address cannot be opened.
        """
        super().__init__(url, max_file_bytes=max_file_bytes)
        try:
            self._files, base = open_url(url)
        except Exception as err:
            raise unreadable_error(url, err) from err
        self._base = base.rstrip("/")
        self._default_version = text_number(url)
        self._lock = request_lock(self._files)

    def __repr__(self) -> str:
        return f"RemoteSource({without_secrets(str(self.address))!r})"

    def open(self, path: str, num_bytes: int = 0) -> Opened:
        """See `Source.open`."""
        require_size(num_bytes, self.max_file_bytes)
        if num_bytes <= MAX_BUFFERED_BYTES:
            return io.BytesIO(self.read(path, num_bytes))
        try:
            with self._lock:
                return self._files.open(self._full(path), "rb")
        except Exception as err:
            raise as_os_error(err) from err

    def read(self, path: str, num_bytes: int = 0) -> bytes:
        """See `Source.read`; `num_bytes` is the listed size, if known."""
        if self._files.async_impl:
            return self._read(path)

        # An archive states its members' sizes, and a member can be larger. Reading one byte more than stated
        # shows the difference without unpacking all of it.
        try:
            with self._lock:
                full = self._full(path)
                stated = num_bytes or self._files.info(full).get("size") or self.max_file_bytes
                require_size(stated, self.max_file_bytes)
                with self._files.open(full, "rb") as file:
                    return bytes(file.read(stated + 1))
        except RefusedFileError:
            raise
        except Exception as err:
            raise as_os_error(err) from err

    def open_text(self, path: str, num_bytes: int = 0) -> Opened:
        """See `Source.open_text`. The walk lists no links of a remote source."""
        return self.open(path, num_bytes)

    def stat_open(self, file: Opened, listed: Stat) -> Stat:
        """See `Source.stat_open`. Only the size is current; the rest is the listed stat."""
        position = file.tell()
        size = file.seek(0, os.SEEK_END)
        file.seek(position)
        return (size, *listed[1:])

    def read_start(self, path: str, num_bytes: int) -> bytes:
        """Return the first `num_bytes` bytes of a file.

        Raises:
            OSError: The file cannot be read.
        """
        return self._read(path, start=0, end=num_bytes)[:num_bytes]

    def stats(self, paths: Sequence[str]) -> npt.NDArray[np.int64]:
        """See `Source.stats`. Each folder that contains one of the files is listed once."""
        folders = sorted({posixpath.dirname(path) for path in paths})
        stat_of: dict[str, Stat | None] = {}
        with ThreadPoolExecutor(REMOTE_THREADS, thread_name_prefix="stats") as pool:
            for items in pool.map(self._list_or_empty, folders):
                stat_of.update((item.path, item.stat) for item in items)
        return _stat_array([stat_of.get(path) or NO_FILE for path in paths])

    def sibling_names(self, path: str) -> list[str]:
        """See `Source.sibling_names`."""
        try:
            return [posixpath.basename(item.path) for item in self.list_folder(posixpath.dirname(path))]
        except DatasetError:
            return []

    def list_folder(self, folder: str) -> list[ListedPath]:
        """Return the items of a folder, "" for the source itself, without using a cached listing.

        Raises:
            DatasetError: The folder does not exist, is a file, or cannot be listed. Its cause is the error
                raised by fsspec.
        """
        try:
            with self._lock:
                self._files.invalidate_cache()
                infos: list[dict[str, Any]] = self._files.ls(self._full(folder), detail=True)

                # fsspec lists a file as a folder that contains only itself.
                listed = [(info["name"].strip("/"), info["type"]) for info in infos]
                if listed == [(self._full(folder).strip("/"), "file")]:
                    raise NotADirectoryError("it is a file")
                return list(self._items(folder, infos))
        except Exception as err:
            raise unreadable_error(self.where(folder) if folder else self.address, err) from err

    def walk_files(self, folder: str = "") -> Iterator[ListedPath]:
        """Yield every file below a folder, without files and folders whose names begin with a dot."""
        for item in self.list_folder(folder):
            if posixpath.basename(item.path).startswith("."):
                continue
            if item.stat is None and not item.is_special:
                yield from self.walk_files(item.path)
            else:
                yield item

    def _read(self, path: str, **limits: int) -> bytes:
        try:
            with self._lock:
                return bytes(self._files.cat_file(self._full(path), **limits))
        except Exception as err:
            raise as_os_error(err) from err

    def _list_or_empty(self, folder: str) -> list[ListedPath]:
        try:
            return self.list_folder(folder)
        except DatasetError as err:
            if isinstance(err.__cause__, (FileNotFoundError, NotADirectoryError)):
                return []
            raise

    def _items(self, folder: str, infos: Sequence[Mapping[str, Any]]) -> Iterator[ListedPath]:
        top = self._full(folder).strip("/")
        without_size: list[str] = []
        for info in infos:
            # Listings may contain a marker of the folder itself, and those of web pages other links.
            full_name = str(info["name"]).strip("/")
            name = full_name[len(top) :].lstrip("/") if full_name.startswith(top) else ""
            if not name or "/" in name or name.startswith("?"):
                continue

            path = f"{folder}/{name}" if folder else name
            if info["type"] != "file":
                yield ListedPath(path, None, is_special=info["type"] != "directory")
            elif "\0" in name:  # allowed in keys of object stores, but not in paths
                yield ListedPath(path, None, is_special=True)
            elif info.get("size") is None:
                without_size.append(path)
            else:
                yield ListedPath(path, self._stat(info))

        with ThreadPoolExecutor(REMOTE_THREADS, thread_name_prefix="stats") as pool:
            full_infos = pool.map(self._info, without_size)
            for path, info in zip(without_size, full_infos, strict=True):
                yield ListedPath(path, self._stat(info))

    def _info(self, path: str) -> Mapping[str, Any]:
        """Return fsspec's information about a file; an empty file for a redirect that is not followed.

        Reading such a file fails with the reason, which rejects one sample instead of the dataset.
        """
        try:
            return self._files.info(self._full(path))
        except FileNotFoundError as err:
            if isinstance(err.__cause__, RedirectRefusedError):
                return {"size": 0}
            raise

    def _stat(self, info: Mapping[str, Any]) -> Stat:
        """Return the stat of a file, with a hash of the address in place of a missing version."""
        num_bytes, time_ns, changed_ns, version = stat_from_info(info)
        return num_bytes, time_ns, changed_ns, version or self._default_version

    def _full(self, path: str) -> str:
        return join_path(self._base, path)


def source_at(
    address: Address, *, max_file_bytes: int = MAX_FILE_BYTES, follow_links: bool = False
) -> LocalSource | RemoteSource:
    """Return the source of the files below a path or URL; a local path need not exist.

    With `follow_links`, the caption files of a local source may be links to files outside it.

    Raises:
        DatasetError: The URL cannot be opened.
    """
    if isinstance(address, Url):
        return RemoteSource(address, max_file_bytes=max_file_bytes)
    return LocalSource(address, max_file_bytes=max_file_bytes, follow_links=follow_links)


def threads_for(sources: Iterable[Source]) -> int | None:
    """Return the number of threads that may read from several sources; None for one per core."""
    return max((source.threads for source in sources if source.threads), default=None)


def to_int64(number: int) -> int:
    """Wrap a number of a stat into the int64 range of the tables.

    Some file systems use inodes of 64 bits, and a file may be dated after 2262, when nanoseconds overflow.
    """
    return number if -(2**63) <= number < 2**63 else (number + 2**63) % 2**64 - 2**63


def _stat_array(stats: Sequence[Stat]) -> npt.NDArray[np.int64]:
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
