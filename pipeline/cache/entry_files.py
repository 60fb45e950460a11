"""Files of entries on a local disk: reading one with its stat, and linking one to its final name."""

from __future__ import annotations

import errno
import os
import stat as stat_module
from pathlib import Path

from pipeline.cache.entry_format import WrongEntryError
from pipeline.cache.entry_state import EntryStat

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


def read_file(path: Path) -> tuple[bytes, EntryStat]:
    """Return the content of a regular file and its stat, taken before reading.

    Uses system calls directly: a Python file object makes eight of them instead of four, and threads that
    read many small entries wait for each other at every call.

    Raises:
        WrongEntryError: The path is not a regular file.
        OSError: The file does not exist or cannot be read.
    """
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        stat = regular_stat(os.fstat(descriptor))
        data = os.read(descriptor, stat.num_bytes + 1)
        while len(data) < stat.num_bytes and (more := os.read(descriptor, stat.num_bytes + 1)):
            data += more  # one call returns at most 2 GiB, and less after a signal
        return data, stat
    finally:
        os.close(descriptor)


def regular_stat(stat: os.stat_result) -> EntryStat:
    """Convert the stat of a regular file.

    Raises:
        WrongEntryError: It is the stat of something else.
    """
    if not stat_module.S_ISREG(stat.st_mode):
        kind = "a folder" if stat_module.S_ISDIR(stat.st_mode) else "a special file"
        raise WrongEntryError(f"its path must be a regular file, got {kind}")
    return EntryStat(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def link(temp: Path, path: Path) -> bool:
    """Link `temp` to `path`; return False if `path` exists.

    On a file system without hard links, rename instead. Two writers may then rename at the same moment, and
    the later entry remains; both are valid.
    """
    try:
        os.link(temp, path)
    except FileExistsError:
        return False
    except OSError as err:
        if err.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):
            return False
        temp.replace(path)
    return True
