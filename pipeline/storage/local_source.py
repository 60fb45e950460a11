"""Datasets in a folder on this machine."""

from __future__ import annotations

import io
import os
import posixpath
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.storage.regular_files import (
    MAX_FILE_BYTES,
    InsideCheck,
    open_regular,
    read_all,
)
from pipeline.storage.source import NO_FILE, Opened, Source, Stat, stat_array, to_int64


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
        return stat_array([_stat_or_none(f"{root}/{path}") for path in paths])

    def sibling_names(self, path: str) -> list[str]:
        """See `Source.sibling_names`."""
        try:
            return [entry.name for entry in Path(self.address, posixpath.dirname(path)).iterdir()]
        except OSError:
            return []


def _stat_or_none(path: str) -> Stat:
    try:
        stat = os.stat(path)  # noqa: PTH116 - runs for each image of a dataset; a Path would double its time
    except OSError:
        return NO_FILE
    return (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
