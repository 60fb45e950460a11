"""Open files that other people wrote: regular files only, without waiting, and of bounded size.

A dataset can come from a stranger, and a file can be replaced between two stages.
"""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from stat import S_ISREG

MAX_FILE_BYTES = 1_000_000_000
"""Default of the recipe's `checks.max_file_bytes`: the largest file of a dataset that is opened."""


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
    path: str | Path, *, max_bytes: int | None = None, follow_link: bool = True
) -> io.BufferedReader:
    """Open a regular file for reading in binary, without waiting for the writer of a FIFO.

    Without `follow_link`, `path` itself must not be a symbolic link. Its folders may be links in any case.

    Raises:
        RefusedFileError: It is no regular file (`special_file`), or it is too large (`file_too_large`).
        OSError: The file cannot be opened. The error number is ELOOP for a link that must not be followed.
    """
    file = open(path, "rb", opener=_opener if follow_link else _opener_without_link)  # noqa: SIM115 - Path.open has no opener
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


class InsideCheck:
    """Open files only if they are really below one folder; the folder itself may be a link."""

    def __init__(self, root: str | Path) -> None:
        self._real_root = os.path.realpath(root).rstrip("/") + "/"
        self._is_inside: dict[str, bool] = {}

    def contains(self, path: str) -> bool:
        """Return whether a file or folder is below the root after following all links."""
        return f"{os.path.realpath(path)}/".startswith(self._real_root)

    def open(self, path: str, *, max_bytes: int | None = None) -> io.BufferedReader:
        """Open a file as `open_regular` does.

        Raises:
            RefusedFileError: The file is outside the root (`outside_dataset`), or see `open_regular`.
            OSError: The file cannot be opened.
        """
        # Each folder is resolved once.
        folder = path.rpartition("/")[0]
        if folder not in self._is_inside:
            self._is_inside[folder] = self.contains(folder)
        if not self._is_inside[folder]:
            raise self._outside_error(path)

        # Most files are not links. Opening them without following links costs nothing, and no other process
        # can exchange the file between a check and the opening.
        try:
            return open_regular(path, max_bytes=max_bytes, follow_link=False)
        except OSError as err:
            if err.errno != errno.ELOOP:
                raise
        if not self.contains(path):
            raise self._outside_error(path)
        return open_regular(os.path.realpath(path), max_bytes=max_bytes, follow_link=False)

    def _outside_error(self, path: str) -> RefusedFileError:
        detail = f"it is a link to {os.path.realpath(path)}, outside the dataset's folder"
        fix = "replace the link with the file itself, or set datasets[].follow_links: true if you trust it"
        return RefusedFileError("outside_dataset", detail, fix=fix)


def _opener(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a FIFO would wait for its writer. Without O_NOCTTY, a terminal could become
    # the terminal of this process.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def _opener_without_link(path: str, flags: int) -> int:
    return _opener(path, flags | getattr(os, "O_NOFOLLOW", 0))
