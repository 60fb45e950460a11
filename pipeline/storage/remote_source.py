"""A dataset's files on a file system that fsspec opens: an object store, an archive, a web server."""

from __future__ import annotations

import io
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.errors import DatasetError
from pipeline.storage.addresses import Address, Url
from pipeline.storage.remote_files import missing_package, number_of, one_at_a_time, open_url, stat_from_info
from pipeline.storage.source import NO_FILE, Opened, Source, Stat, UnreachableError, stat_columns

REMOTE_THREADS = 16
"""Requests under way at a time; each waits for a server much longer than it works."""

MAX_WHOLE_BYTES = 64_000_000
"""Larger remote files are read in parts where their bytes need not be in memory at once."""


class ListedPath(NamedTuple):
    """What a remote folder holds: a path below the source, and its stat; None for a folder."""

    path: str
    stat: Stat | None
    is_special: bool = False


class RemoteSource(Source):
    """A folder of a file system that fsspec opens."""

    threads = REMOTE_THREADS
    compared_columns = (0, 1, 3)

    def __init__(self, url: Url) -> None:
        """Open the file system anew.

        Raises:
            DatasetError: Its package is missing, or it cannot be opened.
        """
        super().__init__(url)
        try:
            self._files, base = open_url(url)
        except Exception as err:
            raise unreadable(url, err) from err
        self._base = base.rstrip("/")
        self._no_version = number_of(url)
        self._one_at_a_time = one_at_a_time(self._files)

    def __repr__(self) -> str:
        return f"RemoteSource({str(self.address)!r})"

    def open(self, path: str, num_bytes: int = 0) -> Opened:
        """As `Source.open`."""
        if num_bytes <= MAX_WHOLE_BYTES:
            return io.BytesIO(self.read(path))
        try:
            with self._one_at_a_time:
                return self._files.open(self._full(path), "rb")
        except Exception as err:
            raise _of_one_file(err) from err

    def read(self, path: str) -> bytes:
        """As `Source.read`."""
        try:
            with self._one_at_a_time:
                return bytes(self._files.cat_file(self._full(path)))
        except Exception as err:
            raise _of_one_file(err) from err

    def stat_open(self, file: Opened, listed: Stat) -> Stat | None:
        """As `Source.stat_open`: as listed before it was read, with the size that was read."""
        position = file.tell()
        size = file.seek(0, os.SEEK_END)
        file.seek(position)
        return (size, *listed[1:])

    def start(self, path: str, num_bytes: int) -> bytes:
        """The file's first bytes.

        Raises:
            OSError: It cannot be read.
        """
        try:
            with self._one_at_a_time:
                return bytes(self._files.cat_file(self._full(path), start=0, end=num_bytes))[:num_bytes]
        except Exception as err:
            raise _of_one_file(err) from err

    def stats(self, paths: Sequence[str]) -> npt.NDArray[np.int64]:
        """As `Source.stats`; each folder that one of them is in is listed once."""
        folders = sorted({posixpath.dirname(path) for path in paths})
        listed: dict[str, Stat | None] = {}
        with ThreadPoolExecutor(REMOTE_THREADS, thread_name_prefix="stats") as pool:
            for entries in pool.map(self._entries_or_none, folders):
                listed.update((entry.path, entry.stat) for entry in entries)
        return stat_columns([listed.get(path) or NO_FILE for path in paths])

    def sibling_names(self, path: str) -> list[str]:
        """As `Source.sibling_names`."""
        try:
            return [posixpath.basename(each.path) for each in self.list_folder(posixpath.dirname(path))]
        except DatasetError:
            return []

    def list_folder(self, folder: str) -> list[ListedPath]:
        """What the folder holds now; "" is the source's own.

        Raises:
            DatasetError: It cannot be listed, is a file, or is not there; its cause is what fsspec raised.
        """
        try:
            with self._one_at_a_time:
                self._files.invalidate_cache()
                infos: list[dict[str, Any]] = self._files.ls(self._full(folder), detail=True)
                if [(info["name"].strip("/"), info["type"]) for info in infos] == [
                    (self._full(folder).strip("/"), "file")
                ]:
                    raise NotADirectoryError("it is a file")
                return list(self._entries_of(folder, infos))
        except Exception as err:
            raise unreadable(self.where(folder) if folder else self.address, err) from err

    def walk_files(self, folder: str = "") -> Iterator[ListedPath]:
        """Every file below the folder, whose name and whose folders' names begin with no dot."""
        for entry in self.list_folder(folder):
            if posixpath.basename(entry.path).startswith("."):
                continue
            if entry.stat is None and not entry.is_special:
                yield from self.walk_files(entry.path)
            else:
                yield entry

    def _entries_or_none(self, folder: str) -> list[ListedPath]:
        try:
            return self.list_folder(folder)
        except DatasetError as err:
            if isinstance(err.__cause__, (FileNotFoundError, NotADirectoryError)):
                return []
            raise

    def _entries_of(self, folder: str, infos: Sequence[Mapping[str, Any]]) -> Iterator[ListedPath]:
        """Without what is not directly in the folder: a marker of itself, a web page's other links."""
        top = self._full(folder).strip("/")
        sizeless: list[str] = []
        for info in infos:
            name = str(info["name"]).strip("/")
            below = name[len(top) :].lstrip("/") if name.startswith(top) else ""
            if not below or "/" in below or below.startswith("?"):
                continue
            path = f"{folder}/{below}" if folder else below
            if info["type"] != "file":
                yield ListedPath(path, None, is_special=info["type"] != "directory")
            elif "\0" in below:  # a key may be anything
                yield ListedPath(path, None, is_special=True)
            elif info.get("size") is None:
                sizeless.append(path)
            else:
                yield ListedPath(path, self._stat(info))
        with ThreadPoolExecutor(REMOTE_THREADS, thread_name_prefix="stats") as pool:
            told = pool.map(self._files.info, map(self._full, sizeless))
            yield from (ListedPath(path, self._stat(info)) for path, info in zip(sizeless, told, strict=True))

    def _stat(self, info: Mapping[str, Any]) -> Stat:
        """As `stat_from_info`, but where no version is told a file of another address has another number."""
        num_bytes, time_ns, changed_ns, version = stat_from_info(info)
        return num_bytes, time_ns, changed_ns, version or self._no_version

    def _full(self, path: str) -> str:
        if not path:
            return self._base
        return f"{self._base}/{path}" if self._base else path


def unreadable(address: Address | str, err: Exception) -> DatasetError:
    """What is wrong with a dataset's address, from what fsspec or the system raised."""
    text = " ".join(str(err).split()) or type(err).__name__
    if isinstance(err, ImportError) and isinstance(address, Url):
        what = f"the dataset's address needs a package that is not installed: {text}"
        return DatasetError(what, where=str(address), fix=f"pip install {missing_package(address)}")
    if isinstance(err, (FileNotFoundError, NotADirectoryError)):
        what = f"the dataset cannot be read: there is nothing at this address ({text})"
        fix = "correct datasets[].path: the server or bucket, the folder, or the archive it names"
        return DatasetError(what, where=str(address), fix=fix)
    what = f"the dataset cannot be read: {type(err).__name__}: {text}"
    fix = (
        "see that the address is right, its service answers and lets you read it; credentials come from the "
        "service's own variables and files, other options from fsspec's (FSSPEC_<PROTOCOL>_<OPTION>)"
    )
    return DatasetError(what, where=str(address), fix=fix)


def _of_one_file(err: Exception) -> OSError:
    """The system's errors as they are; what services raise beside them as one."""
    if isinstance(err, OSError) and err.errno is not None:
        return err
    if isinstance(err, FileNotFoundError):
        return err
    return UnreachableError(f"{type(err).__name__}: {' '.join(str(err).split())[:500]}")
