"""What the system refuses - a full disk, a file that may not be read - in words that say what to do."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import FileAccessError

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_FIXES: dict[int, str] = {
    errno.ENOSPC: "free space on that disk and start the job again: what is finished is kept",
    errno.EDQUOT: "free space within this user's quota and start the job again: what is finished is kept",
    errno.EACCES: "give this user the right to it (ls -l shows who has it), or run as a user that has",
    errno.EPERM: "give this user the right to it (ls -l shows who has it), or run as a user that has",
    errno.EROFS: "put cache_dir and output_dir on a disk that may be written",
    errno.EMFILE: "allow more open files: ulimit -n 4096",
    errno.ENFILE: "close other programs: the system's table of open files is full",
    errno.EIO: "look at the disk (dmesg): it could not be read or written",
    errno.ESTALE: "mount the network folder again and start the job again",
}

_IN_TEXT = re.compile(r"\(os error (\d+)\)")
"""How libraries written in Rust pass on the system's number: safetensors, Polars."""


def as_file_access_error(err: BaseException) -> FileAccessError | None:
    """The refusal behind `err` in words; None where no error number of the system is to be found.

    The error itself and what it came from are looked at; the first with a number counts.
    """
    looked_at: BaseException | None = err
    while looked_at is not None:
        number = os_error_number(looked_at)
        if number is not None:
            return _stated(looked_at, number)
        looked_at = looked_at.__cause__ or looked_at.__context__
    return None


def os_error_number(err: BaseException) -> int | None:
    """The system's error number that `err` itself carries or tells; None where there is none."""
    if isinstance(err, OSError):
        return err.errno
    found = _IN_TEXT.search(str(err))
    return int(found[1]) if found else None


@contextmanager
def attach_path(path: Path) -> Generator[None]:
    """Let a refusal in the body name `path`, which a library that writes it may leave out.

    Raises:
        OSError: The refusal, with `path` as its `filename`; any other error passes through.
    """
    try:
        yield
    except Exception as err:
        number = os_error_number(err)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from err


def _stated(err: BaseException, number: int) -> FileAccessError:
    names = [str(name) for name in (getattr(err, "filename", None), getattr(err, "filename2", None)) if name]
    what = "the disk is full" if number in DISK_FULL else os.strerror(number)
    code = errno.errorcode.get(number, str(number))
    return FileAccessError(
        f"{what} ({code})",
        where="\n".join(names) or str(err),
        fix=_FIXES.get(number, "see that the path is there and can be used, and start the job again"),
    )
