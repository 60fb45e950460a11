"""Errors of the operating system, such as a full disk or a missing permission, with a fix for each."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import FileAccessError, StoreError
from pipeline.escaping import printable_name

SPARE_BYTES = 64 * 2**20
"""Disk space that encoding keeps free beyond the missing entries."""

SQLITE_FIXES = {
    "database or disk is full": "free space on that disk and start the command again; finished work is kept",
    "attempt to write a readonly database": "give this user write access to it and start the command again",
    "disk I/O error": "free space if that disk is full (df -h), or check whether it fails (dmesg)",
}
"""Fixes for errors of SQLite, in which Dagster stores its history, by a part of SQLite's message."""

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers raised when a disk or a quota is full."""

_PERMISSION_FIX = "give this user permission (ls -l shows the owner), or run as a user who has it"

_FIXES: dict[int, str] = {
    errno.ENOSPC: "free space on that disk and start the job again; finished work is kept",
    errno.EDQUOT: "free space within this user's quota and start the job again; finished work is kept",
    errno.EACCES: _PERMISSION_FIX,
    errno.EPERM: _PERMISSION_FIX,
    errno.EROFS: "move cache_dir and output_dir to a writable disk",
    errno.EMFILE: "allow more open files: ulimit -n 4096",
    errno.ENFILE: "close other programs: the system has too many open files",
    errno.EFBIG: "allow larger files (ulimit -f), or use a disk with a file system that does",
    errno.EIO: "check the disk for hardware errors (dmesg)",
    errno.ESTALE: "mount the network folder again and start the job again",
}

_RUST_ERROR = re.compile(r"\(os error (\d+)\)|\bOs \{ code: (\d+),")
"""Forms in which libraries written in Rust, such as safetensors and Polars, report an error number.

The second one is in the message of a panic.
"""


def as_file_access_error(err: BaseException) -> FileAccessError | None:
    """Return the first error of the operating system among `err`, its causes and contexts, or None."""
    current: BaseException | None = err
    while current is not None:
        number = os_error_number(current)
        if number is not None:
            return _file_access_error(current, number)
        current = current.__cause__ or current.__context__
    return None


def os_error_number(err: BaseException) -> int | None:
    """Return the error number of `err`, from its `errno` or its text; None without one."""
    if isinstance(err, OSError) and err.errno is not None:
        return err.errno
    # Polars' own instances of OSError have the number in their text only.
    match = _RUST_ERROR.search(str(err))
    return int(match[1] or match[2]) if match else None


def is_disk_full(err: OSError) -> bool:
    """Return whether a disk or a quota is full."""
    return err.errno in _DISK_FULL


def is_write_denied(err: BaseException | None) -> bool:
    """Return whether a disk is mounted read-only, or this user may not write."""
    return isinstance(err, PermissionError) or (isinstance(err, OSError) and err.errno == errno.EROFS)


def entry_disk_full_error(num_bytes: int, where: str) -> StoreError:
    """Return the error for a cache entry of `num_bytes` bytes for which the disk has no space."""
    return StoreError(
        f"the disk is full: an entry of {num_bytes} bytes cannot be written",
        where=where,
        fix="free some space or set cache_dir to another disk, and start again: existing entries stay valid",
    )


def require_disk_space(cache_dir: Path, needed_bytes: int) -> None:
    """Raise StoreError unless the disk has `SPARE_BYTES` more free space than the missing entries need."""
    # The cache is created by its first write, so the folder need not exist yet.
    existing = next(folder for folder in (cache_dir, *cache_dir.parents) if folder.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes + SPARE_BYTES:
        raise StoreError(
            f"the disk must have {needed_bytes + SPARE_BYTES:,} bytes free for the missing entries "
            f"({SPARE_BYTES:,} of them stay free), got {free_bytes:,}",
            where=str(cache_dir),
            fix="free some space there, or set cache_dir to another disk",
        )


@contextmanager
def attach_path(path: Path) -> Generator[None]:
    """Add `path` to an error of the operating system raised in the body by a library that omits it."""
    try:
        yield
    except Exception as err:
        number = os_error_number(err)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from err


def _file_access_error(err: BaseException, number: int) -> FileAccessError:
    names = (getattr(err, "filename", None), getattr(err, "filename2", None))
    # The name of a file must not look like another part of the message.
    paths = [printable_name(str(name)) for name in names if name]
    what = "the disk is full" if number in _DISK_FULL else os.strerror(number)
    return FileAccessError(
        f"{what} ({errno.errorcode.get(number, number)})",
        where="\n".join(paths) or str(err),
        fix=_FIXES.get(number, "check that the path exists and is accessible, and start the job again"),
    )
