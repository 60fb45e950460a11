"""Open files that other people wrote: regular files only, without waiting, and of bounded size.

A dataset can come from a stranger, and a file can be replaced between two stages.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from stat import S_ISREG

MAX_FILE_BYTES = 1_000_000_000
"""Default of the recipe's `checks.max_file_bytes`: the largest file of a dataset that is opened."""

TEXT_LINK_FIX = "replace the link with the file itself, or set datasets[].follow_links: true if you trust it"
"""Instruction for a link to a text outside the dataset."""

IMAGE_LINK_FIX = "replace the link with the file itself, and start the job again"
"""Instruction for a link to an image outside the dataset that the scan did not find."""

# Files are read in the order of their names, so a folder is rarely needed again. A recipe may have many
# datasets, and Linux allows a process 1,024 descriptors by default.
_MAX_OPEN_FOLDERS = 4
"""Number of subfolders of a dataset that stay open."""

# O_PATH, which only Linux has, opens a folder that may be entered but not listed.
_FOLDER_FLAGS = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)


class RefusedFileError(OSError):
    """A file that exists but is not read.

    Attributes:
        reason: Snake-case code for the column `reason` of rejected samples.
        detail: Explanation without the path.
        fix: Instructions for the user.
    """

    def __init__(self, reason: str, detail: str, *, fix: str) -> None:
        """Store the parts; `str` of the error is `detail`."""
        self.reason = reason
        self.detail = detail
        self.fix = fix
        super().__init__(detail)


def open_regular(
    path: str | Path, *, max_bytes: int | None = None, folder: OpenFolder | None = None
) -> io.BufferedReader:
    """Open a regular file for reading in binary, without waiting for the writer of a FIFO.

    With `folder`, `path` is the name of a file in that folder, and must not be a symbolic link.

    Raises:
        RefusedFileError: It is no regular file (`special_file`), or it is too large (`file_too_large`).
        OSError: The file cannot be opened. The error number is ELOOP for a link that must not be followed.
    """

    def opener(path: str, flags: int) -> int:
        # Without O_NONBLOCK, opening a FIFO would wait for its writer. Without O_NOCTTY, a terminal could
        # become the terminal of this process.
        flags |= os.O_NONBLOCK | os.O_NOCTTY
        return os.open(path, flags) if folder is None else folder.open(path, flags)

    file = open(path, "rb", opener=opener)  # noqa: SIM115 - Path.open has no opener
    try:
        # The opened file is checked, since its name may belong to another file a moment later. A device such
        # as /dev/zero has no end.
        stat = os.fstat(file.fileno())
        if not S_ISREG(stat.st_mode):
            detail = "it is not a regular file"
            raise RefusedFileError("special_file", detail, fix="move it out of the dataset")
        require_size(stat.st_size, max_bytes)
    except BaseException:
        file.close()
        raise
    return file


def read_all(file: io.BufferedReader) -> bytes:
    """Return the remaining bytes of an opened file, at most one byte more than its size."""
    # The additional byte shows that the file is growing: the result then has another hash and another size.
    return file.read(os.fstat(file.fileno()).st_size + 1)


def require_size(num_bytes: int, max_bytes: int | None) -> None:
    """Raise RefusedFileError if a file is larger than the limit; None allows any size."""
    if max_bytes is not None and num_bytes > max_bytes:
        detail = f"it must have at most {max_bytes:,} bytes, got {num_bytes:,}"
        fix = f"make it smaller, or remove it; or set checks.max_file_bytes to {num_bytes} if you trust it"
        raise RefusedFileError("file_too_large", detail, fix=fix)


class OpenFolder:
    """A descriptor of a folder, which is closed with the last reference to it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)

    def open(self, name: str, flags: int) -> int:
        """Return the descriptor of a file or folder in this folder, without following a link."""
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=self._descriptor)


class InsideFolder:
    """Open files and folders only if they are really below one folder; the folder itself may be a link.

    A path is opened component by component, each below the descriptor of its folder and without following
    links. A check of the path before it is opened would not suffice: another process could exchange a folder
    for a link in between.
    """

    def __init__(self, root: str | Path) -> None:
        """Store the root; it is opened with the first path."""
        self._path = os.fspath(root)
        self._real_path = os.path.realpath(root).rstrip("/") + "/"
        self._folder_below = lru_cache(_MAX_OPEN_FOLDERS)(_open_below)

    @cached_property
    def _root(self) -> OpenFolder:
        return OpenFolder(os.open(self._path, _FOLDER_FLAGS))

    def open(self, path: str, *, max_bytes: int | None = None, fix: str = TEXT_LINK_FIX) -> io.BufferedReader:
        """Open a file as `open_regular` does; its path is relative to the root, and may contain inner links.

        `fix` is the instruction for a file outside the root.

        Raises:
            RefusedFileError: The file is outside the root (`outside_dataset`), or see `open_regular`.
            OSError: The file cannot be opened.
        """
        try:
            return self._open(path, max_bytes)
        except OSError as err:
            # A link among the folders is "not a directory".
            if err.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise

        # If the real path has a link again, it was exchanged a moment ago, and the error is raised.
        real_path = os.path.realpath(f"{self._path}/{path}")
        if not real_path.startswith(self._real_path):
            detail = f"it is a link to {real_path}, outside the dataset's folder"
            raise RefusedFileError("outside_dataset", detail, fix=fix)
        return self._open(real_path.removeprefix(self._real_path), max_bytes)

    @contextmanager
    def listing(self, folder: str) -> Generator[int]:
        """Yield a descriptor that lists a folder, "" for the root; none of its components may be a link."""
        parent, _, name = folder.rpartition("/")
        within = self._folder_below(self._root, parent)
        descriptor = within.open(name or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _open(self, path: str, max_bytes: int | None) -> io.BufferedReader:
        folder, _, name = path.rpartition("/")
        return open_regular(name, max_bytes=max_bytes, folder=self._folder_below(self._root, folder))


def _open_below(root: OpenFolder, path: str) -> OpenFolder:
    folder = root
    for name in path.split("/"):
        if name == "..":
            raise OSError(errno.ELOOP, "the path leads upwards")
        if name:
            folder = OpenFolder(folder.open(name, _FOLDER_FLAGS))
    return folder


def file_sha256(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
