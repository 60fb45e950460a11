"""A cache on a local disk, in which a file gets its name when it is complete and synced."""

from __future__ import annotations

import errno
import os
import shutil
import stat as stat_module
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.cache.entry_format import Kind
from pipeline.cache.folder import (
    DISPLACED_SUFFIX,
    NO_STAT,
    CacheFile,
    CacheFolder,
    FileStat,
    NotAFileError,
    entry_name,
)
from pipeline.storage.atomic import sync_folder, temp_path_for, write_bytes

# Error numbers with which file systems that have no hard links, or a limit on them, refuse a link.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class LocalFolder(CacheFolder):
    """Files of a cache on a local disk; the folder is created by the first write."""

    threads = os.cpu_count() or 1
    readers = 1  # several threads wait for the interpreter more than for the disk
    fix = "make sure that cache_dir is on a working disk and that this user may read and write it"
    reads_packs_first = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._root = root

    def stat(self, name: str) -> FileStat:
        """See `CacheFolder.stat`."""
        return _regular_stat((self._root / name).stat())

    def entry_stats(self, kind: Kind, keys: Collection[str]) -> npt.NDArray[np.int64]:
        """See `CacheFolder.entry_stats`."""
        # One array, because a tuple of Python integers for each entry would take several times the memory.
        values, root = array("q"), str(self._root)
        for key in keys:
            try:
                stat = os.stat(f"{root}/{entry_name(kind, key)}")  # noqa: PTH116 - a Path costs more than the call
            except OSError:
                values.extend(NO_STAT)
                continue
            is_file = stat_module.S_ISREG(stat.st_mode)
            values.extend(_file_stat(stat) if is_file else NO_STAT)
        return np.frombuffer(values, dtype=np.int64).reshape(-1, 4)

    def read(self, name: str) -> bytes:
        """See `CacheFolder.read`."""
        return self.read_with_stat(name)[0]

    def read_with_stat(self, name: str) -> tuple[bytes, FileStat]:
        """See `CacheFolder.read_with_stat`."""
        # A Python file object makes eight system calls instead of four, and threads that read many small
        # entries wait for each other at every call. Without O_NONBLOCK, opening a named pipe would wait for a
        # writer.
        descriptor = os.open(f"{self._root}/{name}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            stat = _regular_stat(os.fstat(descriptor))
            num_bytes = stat[0]
            data = os.read(descriptor, num_bytes + 1)
            while len(data) < num_bytes and (more := os.read(descriptor, num_bytes + 1)):
                data += more  # one call returns at most 2 GiB, and less after a signal
            return data, stat
        finally:
            os.close(descriptor)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """See `CacheFolder.read_range`."""
        descriptor = os.open(f"{self._root}/{name}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            data = os.pread(descriptor, end - start, start)
            while len(data) < end - start and (
                more := os.pread(descriptor, end - start - len(data), start + len(data))
            ):
                data += more
            return data
        finally:
            os.close(descriptor)

    def create(self, name: str, data: bytes, is_valid: Callable[[bytes], bool]) -> bool:
        """See `CacheFolder.create`."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = temp_path_for(path)
        try:
            with temp.open("xb") as file:
                file.write(data)

                # The data are on the disk before the name exists, so that a crash leaves no torn entry.
                file.flush()
                os.fsync(file.fileno())

            # A link is refused if the name exists: one of several writers creates the entry, without a lock.
            while not _link(temp, path):
                if self._holds_valid(name, is_valid):
                    return False
                self._clear(path, is_valid)
            return True
        finally:
            with suppress(FileNotFoundError):
                temp.unlink()

    def _holds_valid(self, name: str, is_valid: Callable[[bytes], bool]) -> bool:
        try:
            return is_valid(self.read(name))
        except (FileNotFoundError, NotAFileError):
            return False

    def _clear(self, path: Path, is_valid: Callable[[bytes], bool]) -> None:
        # A rename takes the file from all other processes at once, so only one of them examines and deletes
        # it.
        aside = temp_path_for(path)
        try:
            path.rename(aside)
        except FileNotFoundError:
            return
        if aside.is_dir() and not aside.is_symlink():
            aside.rename(aside.with_name(f"{path.stem}{aside.stem}{DISPLACED_SUFFIX}"))
            return

        # Another process may have replaced it with a valid entry between the check and the rename.
        with suppress(OSError):
            if is_valid(self.read(aside.relative_to(self._root).as_posix())):
                _link(aside, path)
        with suppress(FileNotFoundError):
            aside.unlink()

    def replace(self, name: str, data: bytes) -> None:
        """See `CacheFolder.replace`."""
        path = self._root / name
        write_bytes(path, data)
        sync_folder(path.parent)

    def download(self, name: str, path: Path) -> None:
        """See `CacheFolder.download`."""
        shutil.copyfile(self._root / name, path)

    def files_in(self, folder: str) -> list[CacheFile]:
        """See `CacheFolder.files_in`."""
        stats = self.stats(folder).items()
        return [CacheFile(name, num_bytes, mtime_ns / 1e9) for name, (num_bytes, mtime_ns, _, _) in stats]

    def stats(self, folder: str) -> dict[str, FileStat]:
        """See `CacheFolder.stats`."""
        found: dict[str, FileStat] = {}
        with suppress(FileNotFoundError), os.scandir(self._root / folder) as files:
            for file in files:
                with suppress(FileNotFoundError):
                    if file.is_file():
                        found[file.name] = _file_stat(file.stat())
        return found

    def files(self) -> Iterator[CacheFile]:
        """See `CacheFolder.files`."""
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


def _file_stat(stat: os.stat_result) -> FileStat:
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _regular_stat(stat: os.stat_result) -> FileStat:
    if not stat_module.S_ISREG(stat.st_mode):
        kind = "a folder" if stat_module.S_ISDIR(stat.st_mode) else "a special file"
        raise NotAFileError(f"its path must be a regular file, got {kind}")
    return _file_stat(stat)


def _link(temp: Path, path: Path) -> bool:
    """Link `temp` to `path`; return False if `path` exists."""
    try:
        os.link(temp, path)
    except FileExistsError:
        return False
    except OSError as err:
        if err.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):
            return False

        # Without hard links, two writers may rename at the same moment. The later entry remains; both are
        # valid.
        temp.replace(path)
    return True
