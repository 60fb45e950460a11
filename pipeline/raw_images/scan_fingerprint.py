"""Hash a dataset's file listing: a cheap way for the sensor to detect that any file has changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from stat import S_ISDIR

from pipeline.recipe.validators import MANIFEST_SUFFIXES
from pipeline.storage.addresses import Address, Url
from pipeline.storage.remote_source import RemoteSource

IGNORED_PREFIX = "."
"""Prefix of names that do not belong to a dataset: editors, file managers and copying tools create them."""


def scan_fingerprint(folders: Iterable[Address]) -> str:
    """Return 16 hex digits over the path, size and times of every file below `folders`, in the given order.

    No file is opened. Links count by their targets, and each folder is listed once, so loops end. The change
    time is included: it detects a file that was edited and given its old modification time back. If one of
    `folders` is a file, it counts as itself. A subfolder that cannot be listed counts as unreadable and does
    not hide changes in other folders. For a remote address, the hash covers the stat that the server reports
    for each file.

    Raises:
        OSError: One of `folders` cannot be listed.
        DatasetError: A remote address cannot be listed.
    """
    digest = hashlib.sha256()
    for folder in folders:
        lines = _remote_lines(folder) if isinstance(folder, Url) else _local_lines(folder)
        for line in sorted(lines):  # each line has the full path, so folders need no separator
            digest.update(line)
    return digest.hexdigest()[:16]


def _local_lines(top: Path) -> Iterator[bytes]:
    pending = [top]
    visited: set[tuple[int, int]] = set()
    while pending:
        folder = pending.pop()
        try:
            stat = folder.stat()
            identity = (stat.st_dev, stat.st_ino)
            is_folder = S_ISDIR(stat.st_mode)
            entries = _entries(folder) if is_folder and identity not in visited else []
        except OSError as err:
            if folder is top:
                raise
            yield os.fsencode(folder) + b"\0" + _unreadable_state(err) + b"\n"
            continue

        visited.add(identity)
        if not is_folder:
            yield os.fsencode(folder) + b"\0" + _file_state(stat) + b"\n"
        for entry in entries:
            if _is_folder(entry):
                pending.append(Path(entry.path))
            else:
                yield _line(entry)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(IGNORED_PREFIX)]


def _remote_lines(url: Url) -> Iterator[bytes]:
    if url.suffix.lower() in MANIFEST_SUFFIXES:
        (stat,) = RemoteSource(url.parent).stats([url.name]).tolist()
        yield f"{url}\0{stat}\n".encode()
        return
    source = RemoteSource(url)
    for entry in source.walk_files():
        yield f"{source.where(entry.path)}\0{entry.stat}\n".encode("utf-8", "surrogateescape")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _line(entry: os.DirEntry[str]) -> bytes:
    try:
        state = _file_state(entry.stat())
    except OSError as err:  # a deleted file or a broken link is a state of the listing too
        state = _unreadable_state(err)
    return os.fsencode(entry.path) + b"\0" + state + b"\n"


def _unreadable_state(err: OSError) -> bytes:
    return b"unreadable %d" % (err.errno or 0)


def _file_state(stat: os.stat_result) -> bytes:
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}".encode("ascii")
