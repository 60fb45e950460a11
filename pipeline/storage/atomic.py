"""Files that appear whole: temp file in the same folder, fsync, rename."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from pipeline.storage.os_errors import os_error_number

TEMP_SUFFIX = ".tmp"
"""Of every file that is still being written; nothing finished ends so."""


_TEMP_NAME = re.compile(rf"\.[0-9]+-[0-9a-f]{{16}}{re.escape(TEMP_SUFFIX)}")


def temp_path_for(path: Path) -> Path:
    """A new path in `path`'s folder that no other process or thread will choose; see `temp_name`."""
    return path.with_name(temp_name())


def temp_name() -> str:
    """A new name; short, so that a file whose name is at the file system's limit can be written too."""
    return f".{os.getpid()}-{secrets.token_hex(8)}{TEMP_SUFFIX}"


def is_temp_name(name: str) -> bool:
    """Whether `temp_name` may have made the name; nobody else's file is called so."""
    return _TEMP_NAME.fullmatch(name) is not None


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace `path` with what `write` puts into the binary file it is given; makes the parent folders.

    A reader sees the old file or the new one, never a part. When anything fails, `path` is as it was, the
    temp file is gone, and the first error is the one raised.

    Raises:
        OSError: The folder cannot be written, or the disk is full; its `filename` is `path`, also where the
            system refused a library that raises errors of its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = temp_path_for(path)
    try:
        with temp.open("xb") as file:
            write(file)
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


def sync_file(path: Path) -> None:
    """Wait until what is in the file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in the folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` with `data`, as `write_atomically`."""
    write_atomically(path, lambda file: file.write(data))


def write_text(path: Path, text: str) -> None:
    """Replace `path` with `text` in UTF-8, as `write_atomically`."""
    write_bytes(path, text.encode("utf-8"))
