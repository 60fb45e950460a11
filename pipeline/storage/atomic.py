"""Atomic file writes: temporary file in the same folder, fsync, rename."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from pipeline.storage.os_errors import os_error_number

TEMP_SUFFIX = ".tmp"
"""Suffix of every file that is still being written; no finished file has it."""

OLD_S = 24 * 3600.0
"""Age from which a temporary file was left by a writer that was killed."""

_TEMP_NAME = re.compile(rf"\.[0-9]+-[0-9a-f]{{16}}{re.escape(TEMP_SUFFIX)}")


def temp_path_for(path: Path) -> Path:
    """Return a new path in the folder of `path`, unique among processes and threads."""
    # In the same folder, because a rename is atomic only within one file system.
    return path.with_name(temp_name())


def temp_name() -> str:
    """Return a new unique name."""
    # The final name is no part of it, because it may be as long as the file system allows.
    return f".{os.getpid()}-{secrets.token_hex(8)}{TEMP_SUFFIX}"


def is_temp_name(name: str) -> bool:
    """Return True if `name` has the form of `temp_name`; files of other programs do not."""
    return _TEMP_NAME.fullmatch(name) is not None


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace `path` with the bytes that `write` puts into the binary file passed to it.

    `write` may read the file too. Parent folders are created. A reader sees either the old file or the new
    one. After an error, `path` is unchanged, the temporary file is removed, and the first error is raised.

    Raises:
        OSError: The folder cannot be written, or the disk is full. Its `filename` is `path`, even if a
            library raised another exception with the error number in its text.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = temp_path_for(path)
    try:
        with temp.open("x+b") as file:
            write(file)

            # The data are on the disk before the name refers to them, so that a crash leaves no torn file.
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
    except BaseException as err:
        with suppress(OSError):
            temp.unlink()
        number = os_error_number(err)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from err


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` with `data`; see `write_atomically`."""
    write_atomically(path, lambda file: file.write(data))


def write_text(path: Path, text: str) -> None:
    """Replace `path` with `text` in UTF-8; see `write_atomically`."""
    write_bytes(path, text.encode("utf-8"))


def allow_readers(path: Path) -> None:
    """Give a file the mode of its folder, without the right to execute.

    For files of the safetensors library, which creates all of them with mode 0600. In a folder that this
    process has created, this is the mode that its umask gives to new files.
    """
    # Python can only read the umask by changing it, for all threads.
    mode = path.parent.stat().st_mode & 0o666

    # File systems without modes of their own, such as a USB disk's, refuse. All of their files have the mode
    # with which they are mounted.
    with suppress(PermissionError):
        path.chmod(mode)


def remove_temp_files(folder: Path, *, min_age_s: float = 0.0) -> None:
    """Remove the temporary files below `folder` that killed writers left, if possible.

    Unless the caller holds a lock that excludes other writers, `min_age_s` must be `OLD_S`.
    """
    for path in folder.rglob(f".*{TEMP_SUFFIX}"):
        with suppress(OSError):
            if is_temp_name(path.name) and (not min_age_s or time.time() - path.stat().st_mtime > min_age_s):
                path.unlink()


def sync_file(path: Path) -> None:
    """Wait until the contents of a file are on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
