"""What a path stands for, by any spelling: the identities of a folder and of every folder above it.

Two paths mean one folder when they share an identity. There are three kinds, for what spelling cannot tell:

    ("inode", device, inode, *rest)    sees through links, `..`, other case, bind mounts of the folder itself
    ("location", device, *names)       sees through bind mounts of a folder above: the names from the file
                                       system's own top, by /proc/self/mountinfo (Linux)
    ("url", protocol, *names)          of an address: the names from the server or bucket on

`rest`, and the end of `names`, are the names below the deepest folder that exists, folded where its file
system folds case. So a path that does not exist yet has identities too. Nothing is ever written.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from pipeline.storage.addresses import Url, anchor, place_parts

Identity = tuple[str | int, ...]

MOUNT_TABLE = Path("/proc/self/mountinfo")

_FOLDING_TYPES = frozenset({"vfat", "msdos", "exfat", "ntfs", "ntfs3", "hfsplus", "cifs", "smb3"})
"""File systems that fold case, asked only where a folder holds nothing to find out with."""

_NAMES_LOOKED_AT = 1000

_ONE_PROTOCOL = {"s3a": "s3", "gcs": "gs", "https": "http", "ssh": "sftp", "az": "abfs", "abfss": "abfs"}
"""Protocols by which the same places are reached."""


@dataclass(frozen=True)
class Mount:
    """One line of the mount table: `place` of the file system `device` is visible at `point`."""

    device: str
    place: str
    point: str
    kind: str


@dataclass(frozen=True)
class Identified:
    """A path's real form and identities.

    Attributes:
        real: Absolute, links and `..` resolved as far as the path exists.
        own: The folder's identities.
        above: Those of every folder above it.
    """

    real: str
    own: frozenset[Identity]
    above: frozenset[Identity]

    def same(self, other: Identified) -> bool:
        """Whether both are one folder."""
        return bool(self.own & other.own)

    def inside(self, other: Identified) -> bool:
        """Whether this one lies below the other, at any depth."""
        return not self.same(other) and bool(other.own & self.above)


def identify(path: Path | str) -> Identified:
    """The identities of `path`, which need not exist; those of an address, of what it lies in as a whole.

    Below a server's address: an archive is the file that it is, and a folder elsewhere is no folder here.
    """
    if isinstance(path, Url):
        lies_in = anchor(path)
        return _identify_url(lies_in) if isinstance(lies_in, Url) else identify(lies_in)
    real = os.path.realpath(path)
    mounts = mount_table()
    deepest = Path(real)
    while (status := _status(deepest)) is None and deepest != deepest.parent:
        deepest = deepest.parent
    rest = Path(real).relative_to(deepest).parts
    if rest and folds_case(deepest):
        rest = tuple(fold(name) for name in rest)
    anchors = [*_inode(status), *_location(deepest, mounts)]
    above: set[Identity] = {(*identity, *rest[:n]) for identity in anchors for n in range(len(rest))}
    for folder in deepest.parents:
        above.update([*_inode(_status(folder)), *_location(folder, mounts)])
    own = frozenset((*identity, *rest) for identity in anchors)
    for identity in own:
        if identity[0] == "location":
            above.update(identity[:n] for n in range(2, len(identity)))
    return Identified(real, own, frozenset(above))


def _identify_url(url: Url) -> Identified:
    protocol = url.protocol.lower()
    own: Identity = ("url", _ONE_PROTOCOL.get(protocol, protocol), *place_parts(url))
    return Identified(str(url), frozenset([own]), frozenset(own[:n] for n in range(2, len(own))))


def fold(name: str) -> str:
    """`name` as a file system compares it that folds case and Unicode forms."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def folds_case(folder: Path) -> bool:
    """Whether `folder`, which exists, finds a name by another case of it.

    Asked by looking up an entry's name with its case swapped; in a folder without such an entry, by the
    folder's own name in the folder above; where that is another file system, by the file system's kind.
    """
    names: set[str] = set()
    with suppress(OSError), os.scandir(folder) as entries:
        names.update(entry.name for entry in islice(entries, _NAMES_LOOKED_AT))
    swappable = sorted(name for name in names if name.swapcase() != name and name.swapcase() not in names)
    if swappable:
        return _one_file(folder / swappable[0], folder / swappable[0].swapcase())
    here, there = _status(folder), _status(folder.parent)
    swapped = folder.name.swapcase()
    if here and there and here.st_dev == there.st_dev and swapped != folder.name:
        return _one_file(folder, folder.with_name(swapped))
    mount = _mount_of(folder, mount_table())
    return mount.kind in _FOLDING_TYPES if mount else sys.platform in {"darwin", "win32"}


def mount_table() -> dict[str, Mount]:
    """The mounts by mount point, the visible one where several are stacked; empty where there is no table."""
    try:
        text = MOUNT_TABLE.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return {}
    return parse_mounts(text)


@lru_cache(maxsize=4)
def parse_mounts(text: str) -> dict[str, Mount]:
    """The mounts of a mountinfo file, proc(5): lines of id, parent, device, place, point ... - kind ..."""
    mounts: dict[str, Mount] = {}
    for line in text.split("\n"):
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(" "), right.split(" ")
        if len(fields) >= 5:
            place, point = (_unescaped(field) for field in fields[3:5])
            mounts[point] = Mount(fields[2], place, point, kinds[0])
    return mounts


def _unescaped(field: str) -> str:
    r"""Spaces, tabs, newlines and backslashes are written as \040 and so on."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _mount_of(path: Path, mounts: dict[str, Mount]) -> Mount | None:
    return next((mounts[str(above)] for above in (path, *path.parents) if str(above) in mounts), None)


def _location(path: Path, mounts: dict[str, Mount]) -> list[Identity]:
    mount = _mount_of(path, mounts)
    if mount is None:
        return []
    names = [*Path(mount.place).parts[1:], *path.relative_to(mount.point).parts]
    return [("location", mount.device, *names)]


def _inode(status: os.stat_result | None) -> list[Identity]:
    """None where the file system gives no inode numbers: they would make all folders one."""
    return [("inode", status.st_dev, status.st_ino)] if status and status.st_ino else []


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _one_file(first: Path, second: Path) -> bool:
    """Whether two names, neither followed if it is a link, are one file."""
    try:
        return os.path.samestat(first.lstat(), second.lstat())
    except OSError:
        return False
