"""The store on a file system that fsspec knows: an object store, another machine's disk, memory.

A module of its own, because it is not what a recipe's `cache_dir` takes yet: tables remember an entry's stat,
gc and the registrations walk folders, and the order of an encoding process names a local path.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.atomic import temp_beside
from pipeline.entry_format import DATA_START, EntrySpec, Kind, WrongEntryError
from pipeline.store import DISPLACED_SUFFIX, EntryStat, Store

LOCAL_PROTOCOLS = ("file", "local")

_TOKEN_BITS = 63


def store_at(url: str, **options: Any) -> Store:
    """The store at `url`: "memory://cache", "s3://bucket/cache", "file:///mnt/cache" or a plain path.

    On a local disk it is `Store` itself, whose links and fsync promise more than any other file system does.

    Args:
        url: Of the root; fsspec's protocols, as far as their packages are installed.
        options: Passed to the file system.
    """
    from fsspec.core import url_to_fs

    found: tuple[Any, str] = url_to_fs(url, **options)
    filesystem, root = found
    protocols = filesystem.protocol
    names = (protocols,) if isinstance(protocols, str) else tuple(protocols)
    return Store(Path(root)) if set(names) & set(LOCAL_PROTOCOLS) else FsspecStore(filesystem, root)


class FsspecStore(Store):
    """Entries below one key of a file system that fsspec knows; as `Store`, but for what writers promise.

    An entry is put under a temporary key and then moved to its own, so nobody sees a part of it. Of writers
    at the very same moment the later one's entry may stand: both are valid. What counts as an entry's stat is
    its size and what the file system says of its version, as one number in place of an inode.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        """`root` is a path within `filesystem`, an `fsspec.AbstractFileSystem`; nothing is read yet."""
        super().__init__(Path(root))
        self._filesystem = filesystem

    def stats(self, kind: Kind, keys: Iterable[str]) -> npt.NDArray[np.int64]:
        """As `Store.stats`; one question to the file system for each key."""
        found: list[tuple[int, int, int, int]] = []
        for key in keys:
            stat = self._stat_or_none(self.path(EntrySpec(kind, key, {})))
            found.append((stat.num_bytes, 0, 0, stat.inode) if stat else (0, 0, 0, 0))
        return np.array(found, dtype=np.int64).reshape(-1, 4)

    def _stat(self, path: Path) -> EntryStat:
        info: dict[str, Any] = self._filesystem.info(path.as_posix())
        if info["type"] != "file":
            raise WrongEntryError("a folder is in its place")
        version = int(self._filesystem.checksum(path.as_posix())) % 2**_TOKEN_BITS
        return EntryStat(int(info["size"]), 0, 0, version)

    def _whole(self, path: Path) -> tuple[bytes, EntryStat]:
        state = self._stat(path)
        return bytes(self._filesystem.cat_file(path.as_posix())), state

    def _start(self, path: Path) -> bytes:
        return bytes(self._filesystem.cat_file(path.as_posix(), start=0, end=DATA_START))

    def _place(self, spec: EntrySpec, path: Path, raw: bytes) -> bool:
        files, temp = self._filesystem, temp_beside(path)
        files.makedirs(path.parent.as_posix(), exist_ok=True)
        try:
            files.pipe_file(temp.as_posix(), raw)
            if files.isdir(path.as_posix()):
                aside = path.with_name(f"{path.stem}{temp.stem}{DISPLACED_SUFFIX}")
                files.mv(path.as_posix(), aside.as_posix(), recursive=True)
            elif self.check(spec).valid:
                return False
            files.mv(temp.as_posix(), path.as_posix())
            return True
        finally:
            with suppress(FileNotFoundError):
                files.rm_file(temp.as_posix())
