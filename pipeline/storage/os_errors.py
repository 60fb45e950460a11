"""Errors of the operating system, such as a full disk or a missing permission, with a fix for each."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import FileAccessError

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
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
    errno.EIO: "check the disk for hardware errors (dmesg)",
    errno.ESTALE: "mount the network folder again and start the job again",
}

_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""Form in which libraries written in Rust, such as safetensors and Polars, report an error number."""


def as_file_access_error(err: BaseException) -> FileAccessError | None:
    """Return the error of the operating system that caused `err`, or None if there is none.

    The first exception with an error number in the chain of causes and contexts counts.
    """
    current: BaseException | None = err
    while current is not None:
        number = os_error_number(current)
        if number is not None:
            return _file_access_error(current, number)
        current = current.__cause__ or current.__context__
    return None


def os_error_number(err: BaseException) -> int | None:
    """Return the error number of `err`, from its `errno` or its text; None without one."""
    if isinstance(err, OSError):
        return err.errno
    match = _RUST_ERROR.search(str(err))
    return int(match[1]) if match else None


@contextmanager
def attach_path(path: Path) -> Generator[None]:
    """Add `path` to an error of the operating system raised in the body by a library that omits it.

    Raises:
        OSError: The error, with `path` as its `filename`. Any other error passes through.
    """
    try:
        yield
    except Exception as err:
        number = os_error_number(err)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from err


def _file_access_error(err: BaseException, number: int) -> FileAccessError:
    paths = [str(name) for name in (getattr(err, "filename", None), getattr(err, "filename2", None)) if name]
    what = "the disk is full" if number in DISK_FULL else os.strerror(number)
    return FileAccessError(
        f"{what} ({errno.errorcode.get(number, number)})",
        where="\n".join(paths) or str(err),
        fix=_FIXES.get(number, "check that the path exists and is accessible, and start the job again"),
    )
