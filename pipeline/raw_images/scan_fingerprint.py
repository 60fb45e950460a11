"""One hash over a dataset's files as the file system lists them: cheap, and another whenever any file is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from stat import S_ISDIR

from pipeline.recipe.validators import MANIFEST_SUFFIXES
from pipeline.storage.addresses import Address, Url

IGNORED_FIRST = "."
"""Names that begin so are no part of a dataset: editors, file managers and copying tools make them."""


def listing_fingerprint(folders: Iterable[Address]) -> str:
    """16 hex digits over path, size and times of each file below `folders`, which stand in a given order.

    A file in the place of a folder counts as itself, and a folder below that cannot be listed as that: the
    others are seen all the same. Of an address it is what its server tells of each file.

    No file is opened. Linked files and folders count by what they lead to; a folder is listed once, so loops
    end. The change time is in it too: it finds a file that was edited and given its old time back.

    Raises:
        OSError: One of `folders` cannot be listed.
        DatasetError: An address cannot be listed.
    """
    digest = hashlib.sha256()
    for folder in folders:
        lines = _remote_lines(folder) if isinstance(folder, Url) else _lines(folder)
        for line in sorted(lines):  # each holds the whole path, so that folders need no mark between
            digest.update(line)
    return digest.hexdigest()[:16]


def _lines(top: Path) -> Iterator[bytes]:
    pending = [top]
    listed: set[tuple[int, int]] = set()
    while pending:
        folder = pending.pop()
        try:
            about = folder.stat()
            is_folder, place = S_ISDIR(about.st_mode), (about.st_dev, about.st_ino)
            entries = _entries(folder) if is_folder and place not in listed else []
        except OSError as err:
            if folder is top:
                raise
            yield os.fsencode(folder) + b"\0" + _unreadable(err) + b"\n"
            continue
        listed.add(place)
        if not is_folder:
            yield os.fsencode(folder) + b"\0" + _facts(about) + b"\n"
        for entry in entries:
            if _is_folder(entry):
                pending.append(Path(entry.path))
            else:
                yield _line(entry)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(IGNORED_FIRST)]


def _remote_lines(url: Url) -> Iterator[bytes]:
    from pipeline.storage.source import RemoteSource  # fsspec, which few need

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
        facts = _facts(entry.stat())
    except OSError as err:  # it vanished, or a link leads nowhere: that is a state of the listing too
        facts = _unreadable(err)
    return os.fsencode(entry.path) + b"\0" + facts + b"\n"


def _unreadable(err: OSError) -> bytes:
    return b"unreadable %d" % (err.errno or 0)


def _facts(about: os.stat_result) -> bytes:
    return f"{about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}".encode("ascii")
