"""Packs in a garbage collection: single entries with a copy in a pack, and packs that no recipe needs.

The order of the steps keeps every entry readable, wherever a process is killed. A single entry is deleted
after its packed copy was read and verified, and after readers were made to list the packs again. The index of
a pack is deleted before the pack.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field

from pipeline.cache.entry_format import KINDS, Kind
from pipeline.cache.folder import CacheFile, CacheFolder
from pipeline.cache.pack_format import (
    INDEX_SUFFIX,
    PACK_SUFFIX,
    WrongPackError,
    bad_entries,
    index_path,
    pack_folder,
    pack_path,
)
from pipeline.cache.pack_index import announce_change, read_index, remove_rows
from pipeline.cache.store import SUFFIX
from pipeline.errors import counted
from pipeline.reporting.reports import Log


@dataclass
class Pack:
    """A pack with a valid index.

    Attributes:
        kind: Kind of its entries.
        name: Name without suffix.
        num_bytes: Size of the pack and its index.
        keys: Keys of its entries, 32 bytes each.
        single: Files of entries that the pack also holds, and their sizes.
    """

    kind: Kind
    name: str
    num_bytes: int
    keys: frozenset[bytes]
    single: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def files(self) -> tuple[str, str]:
        """Path of the index, and path of the pack."""
        return index_path(self.kind, self.name), pack_path(self.kind, self.name)

    def is_needed(self, needed: Set[str]) -> bool:
        """Return whether one of the keys is needed."""
        return any(key.hex() in needed for key in self.keys)


class Packs:
    """Packs of a cache as `latentline gc` classifies them.

    Attributes:
        all: Packs with a valid index.
        young: Packs that nothing needs, within the grace period or of unknown age.
        old: Packs that nothing needs and that are older.
        damaged: Paths of the indexes that cannot be read. Their packs are never deleted.
    """

    def __init__(self, cache: CacheFolder) -> None:
        """List the packs and read their indexes.

        Raises:
            OSError: The cache cannot be listed, or an index cannot be read.
        """
        self.all: list[Pack] = []
        self.young: list[Pack] = []
        self.old: list[Pack] = []
        self.damaged: list[str] = []
        for kind in KINDS:
            self._add(cache, kind)
        # If several packs hold an entry, readers use the first one, so that copy is the one to verify.
        self._by_key: dict[tuple[str, bytes], Pack] = {
            (pack.kind, key): pack for pack in reversed(self.all) for key in pack.keys
        }
        self._files = {name for pack in self.all for name in pack.files}
        for index in self.damaged:
            self._files |= {index, f"{index.removesuffix(INDEX_SUFFIX)}{PACK_SUFFIX}"}

    def _add(self, cache: CacheFolder, kind: Kind) -> None:
        """Read the indexes of one kind."""
        files = cache.stats(pack_folder(kind))
        for file in sorted(files):
            name = file.removesuffix(INDEX_SUFFIX)
            if file == name or f"{name}{PACK_SUFFIX}" not in files:
                continue
            pack_bytes = files[f"{name}{PACK_SUFFIX}"][0]
            try:
                index = read_index(cache, kind, name, pack_bytes)
            except FileNotFoundError:
                continue
            except WrongPackError:
                self.damaged.append(index_path(kind, name))
                continue
            keys = frozenset(map(bytes.fromhex, index["key"]))
            self.all.append(Pack(kind, name, pack_bytes + files[file][0], keys))

    @property
    def num_entries(self) -> int:
        """Number of entries; an entry in several packs counts once."""
        return len(self._by_key)

    @property
    def single(self) -> dict[str, int]:
        """Size of each single entry that a pack also holds, by path."""
        return {name: size for pack in self.all for name, size in pack.single.items()}

    def add_single(self, kind: str, key: str, file: CacheFile) -> bool:
        """Record the file of an entry, and return whether a pack holds the entry too."""
        pack = self._by_key.get((kind, bytes.fromhex(key)))
        if pack is not None:
            pack.single[file.name] = file.num_bytes
        return pack is not None

    def is_complete(self, name: str) -> bool:
        """Return whether a file belongs to a pack with an index."""
        return name in self._files

    def classify(self, needed: Set[str], is_old: Callable[[str], bool]) -> None:
        """Find the packs that nothing needs.

        Args:
            needed: Keys that users need.
            is_old: Returns whether a file is older than the grace period.
        """
        for pack in self.all:
            if not pack.is_needed(needed):
                (self.old if all(map(is_old, pack.files)) else self.young).append(pack)


def delete_single(cache: CacheFolder, packs: Packs, *, log: Log) -> dict[str, int]:
    """Delete single entries after verifying their copies in packs; return the deleted files and their sizes.

    A damaged copy is removed from its index, and the single entry stays. Of several copies, the one that
    readers use is verified.

    Args:
        cache: Files of the cache.
        packs: Packs with the single entries to delete.
        log: Receives a line for each pack with damaged entries.

    Raises:
        OSError: A file cannot be read or deleted.
    """
    deleted: dict[str, int] = {}
    for pack in packs.all:
        if not pack.single:
            continue
        valid_keys = _verified_keys(cache, pack, log)
        announce_change(cache, pack.kind)
        for name, size in pack.single.items():
            if name.rpartition("/")[2].removesuffix(SUFFIX) not in valid_keys:
                continue
            try:
                cache.delete(name)
            except FileNotFoundError:
                continue
            deleted[name] = size
    return deleted


def _verified_keys(cache: CacheFolder, pack: Pack, log: Log) -> set[str]:
    """Return the keys of the valid entries of a pack, which is read completely."""
    try:
        content = cache.read(pack_path(pack.kind, pack.name))
        index = read_index(cache, pack.kind, pack.name, len(content))
    except (FileNotFoundError, WrongPackError):
        return set()  # deleted or damaged since the survey

    problems = bad_entries(pack.kind, index, content)
    if problems:
        remove_rows(cache, pack.kind, pack.name, problems)
        entries = counted(len(problems), "damaged entry", "damaged entries")
        where = cache.where(pack_path(pack.kind, pack.name))
        log(f"warning: a pack has {entries}; latentline pack seals them again: {where}")
    return set(index["key"]) - problems.keys()


def delete_old(cache: CacheFolder, packs: Packs, needed: Callable[[], Set[str]]) -> dict[str, int]:
    """Delete packs that nothing needs; return the deleted files and their sizes.

    Args:
        cache: Files of the cache.
        packs: Packs to delete.
        needed: Returns the keys that users need now; a job may have started since the survey.

    Raises:
        OSError: A file cannot be deleted.
    """
    needed_now = needed() if packs.old else set[str]()
    unneeded = [pack for pack in packs.old if not pack.is_needed(needed_now)]
    deleted: dict[str, int] = {}
    for kind in KINDS:
        own = [pack for pack in unneeded if pack.kind == kind]
        if not own:
            continue
        for pack in own:
            _delete(cache, pack.files[0])
        # Readers stop using the packs before these are deleted.
        announce_change(cache, kind)
        for pack in own:
            _delete(cache, pack.files[1])
            deleted |= {pack.files[0]: 0, pack.files[1]: pack.num_bytes}
    return deleted


def _delete(cache: CacheFolder, name: str) -> None:
    try:
        cache.delete(name)
    except FileNotFoundError:
        return
