"""Identities of paths: which folder a path names, however it is spelled, and which folders contain it.

Two paths name the same folder if they share an identity. There are three kinds:

    ("inode", device, inode, *rest)    sees through links, `..`, case, and bind mounts of the folder itself
    ("location", device, *names)       sees through bind mounts of a parent folder, and through case if inode
                                       numbers change (FUSE): stored names from the top of the file system,
                                       from /proc/self/mountinfo (Linux)
    ("url", protocol, *names)          of a URL: names from the server or bucket

`rest`, and the end of `names`, are the names below the deepest existing folder, folded if its file system
folds case. A path that does not exist yet therefore has identities too. Nothing is ever written.
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

from pipeline.storage.addresses import Url, container, url_parts

Identity = tuple[str | int, ...]

MOUNT_TABLE = Path("/proc/self/mountinfo")
"""Mount table of this process, on Linux only."""

_FOLDING_TYPES = frozenset({"vfat", "msdos", "exfat", "ntfs", "ntfs3", "hfsplus", "cifs", "smb3"})
"""Types of file systems that fold case, used if no name in a folder can be tested."""

_MAX_NAMES_TESTED = 1000

_SAME_PROTOCOL = {"s3a": "s3", "gcs": "gs", "https": "http", "ssh": "sftp", "az": "abfs", "abfss": "abfs"}
"""Protocols that reach the same data as another one."""


@dataclass(frozen=True)
class Mount:
    """One line of the mount table: folder `root` of the file system `device` is visible at `point`."""

    device: str
    root: str
    point: str
    kind: str


@dataclass(frozen=True)
class Identified:
    """Real path and identities of a folder.

    Attributes:
        real: Absolute path, with links and `..` resolved as far as the path exists.
        own: Identities of the folder.
        parents: Identities of every folder that contains it.
    """

    real: str
    own: frozenset[Identity]
    parents: frozenset[Identity]

    def same(self, other: Identified) -> bool:
        """Return True if both are the same folder."""
        return bool(self.own & other.own)

    def inside(self, other: Identified) -> bool:
        """Return True if this folder is below `other`, at any depth."""
        return not self.same(other) and bool(other.own & self.parents)


def identify(path: Path | str) -> Identified:
    """Return the identities of `path`, which need not exist, or of the container of a chained URL."""
    if isinstance(path, Url):
        outermost = container(path)
        return _identify_url(outermost) if isinstance(outermost, Url) else identify(outermost)

    real = os.path.realpath(path)
    mounts = mount_table()
    deepest = Path(real)
    while (status := _status(deepest)) is None and deepest != deepest.parent:
        deepest = deepest.parent

    # Names that do not exist yet follow the case rules of the folder they would be created in.
    rest = Path(real).relative_to(deepest).parts
    if rest and folds_case(deepest):
        rest = tuple(fold(name) for name in rest)
    stored = _as_stored(deepest)
    existing = [*_inode(status), *_location(stored, mounts)]
    own = frozenset((*identity, *rest) for identity in existing)

    parents: set[Identity] = {(*identity, *rest[:n]) for identity in existing for n in range(len(rest))}
    for folder in deepest.parents:
        parents.update(_inode(_status(folder)))
    for folder in stored.parents:
        parents.update(_location(folder, mounts))
    for identity in own:
        # The names of a location include the folders above a bind mount, which are not in the real path.
        if identity[0] == "location":
            parents.update(identity[:n] for n in range(2, len(identity)))
    return Identified(real, own, frozenset(parents))


def fold(name: str) -> str:
    """Return `name` without case, in Unicode NFC, as file systems that fold case compare names."""
    # Case folding decomposes some characters, such as ǰ.
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _as_stored(path: Path) -> Path:
    """Return an existing path with each name as its folder lists it, in its case and Unicode form."""
    stored = Path(path.anchor)
    for name in path.parts[1:]:
        cases = (name, name.swapcase())
        spellings = {unicodedata.normalize(form, each) for form in ("NFC", "NFD") for each in cases}
        # Folders are listed only if another spelling exists too: a large folder takes long.
        is_ambiguous = any(_exists(stored / other) for other in spellings - {name})
        stored /= _listed_as(stored, name) if is_ambiguous else name
    return stored


def folds_case(folder: Path) -> bool:
    """Return True if the file system of an existing folder ignores the case of names."""
    # Nothing may be written, so a name that exists is tested with its case swapped: a name in the folder, or
    # else the name of the folder itself if its parent is on the same file system.
    names: set[str] = set()
    with suppress(OSError), os.scandir(folder) as entries:
        names.update(entry.name for entry in islice(entries, _MAX_NAMES_TESTED))
    testable = sorted(name for name in names if name.swapcase() != name and name.swapcase() not in names)
    if testable:
        return _is_same_entry(folder / testable[0], folder / testable[0].swapcase())

    status, parent_status = _status(folder), _status(folder.parent)
    swapped = folder.name.swapcase()
    if status and parent_status and status.st_dev == parent_status.st_dev and swapped != folder.name:
        return _is_same_entry(folder, folder.with_name(swapped))

    mount = _mount_of(folder, mount_table())
    return mount.kind in _FOLDING_TYPES if mount else sys.platform in {"darwin", "win32"}


def mount_table() -> dict[str, Mount]:
    """Return the visible mounts by mount point; none on systems without a mount table."""
    try:
        text = MOUNT_TABLE.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return {}
    return parse_mounts(text)


@lru_cache(maxsize=4)
def parse_mounts(text: str) -> dict[str, Mount]:
    """Return the mounts of a mountinfo file by mount point; the last mount of a point hides earlier ones."""
    mounts: dict[str, Mount] = {}

    # Fields as in proc(5): id, parent, device, root, point, options - type, source.
    for line in text.split("\n"):
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(" "), right.split(" ")
        if len(fields) >= 5:
            root, point = (_unescaped(field) for field in fields[3:5])
            mounts[point] = Mount(fields[2], root, point, kinds[0])
    return mounts


def _identify_url(url: Url) -> Identified:
    protocol = url.protocol.lower()
    own: Identity = ("url", _SAME_PROTOCOL.get(protocol, protocol), *url_parts(url))
    return Identified(str(url), frozenset([own]), frozenset(own[:n] for n in range(2, len(own))))


def _unescaped(field: str) -> str:
    # Space, tab, newline and backslash are octal escapes in the mount table, such as \040.
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _mount_of(path: Path, mounts: dict[str, Mount]) -> Mount | None:
    return next((mounts[str(folder)] for folder in (path, *path.parents) if str(folder) in mounts), None)


def _location(path: Path, mounts: dict[str, Mount]) -> list[Identity]:
    mount = _mount_of(path, mounts)
    if mount is None:
        return []
    names = [*Path(mount.root).parts[1:], *path.relative_to(mount.point).parts]
    return [("location", mount.device, *names)]


def _inode(status: os.stat_result | None) -> list[Identity]:
    # All folders of some file systems share inode 0.
    return [("inode", status.st_dev, status.st_ino)] if status and status.st_ino else []


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except (OSError, ValueError):
        return False
    return True


def _listed(folder: Path) -> frozenset[str]:
    """Return the names in a folder, none if it cannot be listed."""
    try:
        return frozenset(entry.name for entry in folder.iterdir())
    except OSError:
        return frozenset()


def _listed_as(folder: Path, name: str) -> str:
    """Return how a folder lists a name: as it is, or the first that differs in case or Unicode form only."""
    names = _listed(folder)
    if name in names:
        return name
    return min((other for other in names if fold(other) == fold(name)), default=name)


def _is_same_entry(path: Path, other: Path) -> bool:
    """Return True if two names in one folder are spellings of one entry."""
    try:
        # Links are not followed: two links to one file are two names in any file system.
        same_inode = os.path.samestat(path.lstat(), other.lstat())
    except OSError:
        return False

    # The inode numbers of some FUSE file systems change, so they count only if the folder cannot be listed.
    names = _listed(path.parent)
    return other.name not in names if names else same_inode
