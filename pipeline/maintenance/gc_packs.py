"""Packs in a garbage collection: single entries with a copy in a pack, and packs that no recipe needs.

A single entry is deleted after its packed copy was read and verified, so that every needed entry stays
readable, wherever a process is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field

from pipeline.cache import packs as cache_packs
from pipeline.cache.entry_format import KINDS, Kind
from pipeline.cache.folder import CacheFile, CacheFolder
from pipeline.cache.packs import list_packs, wrong_members
from pipeline.cache.store import SUFFIX
from pipeline.errors import counted
from pipeline.maintenance.deletion import delete_files
from pipeline.reporting.reports import Log

_PACKS_AT_ONCE = 64
"""Number of packs that are deleted before the users' keys are read again."""


@dataclass(eq=False)
class Pack:
    """A pack with a valid header.

    Attributes:
        kind: Kind of its entries.
        file: The pack's file and keys.
        num_bytes: Size of the pack.
        keys: Keys of its entries, 32 bytes each.
        single: Files of entries that the pack also holds, and their sizes.
    """

    kind: Kind
    file: cache_packs.Pack
    num_bytes: int
    keys: frozenset[bytes]
    single: dict[str, int] = field(default_factory=dict[str, int])

    def is_needed(self, needed: Set[str]) -> bool:
        """Return whether one of the keys is needed."""
        return any(key.hex() in needed for key in self.keys)


class Packs:
    """Packs of a cache as `latentline gc` classifies them.

    Attributes:
        all: Packs with a valid header.
        young: Packs that nothing needs, within the grace period or of unknown age.
        old: Packs that nothing needs and that are older.
        damaged: Packs with a damaged header. They are never deleted.
    """

    def __init__(self, cache: CacheFolder) -> None:
        """List the packs and read their headers.

        Raises:
            OSError: The cache cannot be listed, or a pack cannot be read.
        """
        self.all: list[Pack] = []
        self.young: list[Pack] = []
        self.old: list[Pack] = []
        self.damaged: list[str] = []
        for kind in KINDS:
            for pack in list_packs(cache, kind):
                if pack.problem:
                    self.damaged.append(pack.name)
                else:
                    keys = frozenset(map(bytes.fromhex, pack.keys))
                    self.all.append(Pack(kind, pack, pack.stat[0], keys))
        # If several packs hold an entry, readers use the first one, so that copy is the one to verify.
        self._by_key: dict[tuple[str, bytes], Pack] = {
            (pack.kind, key): pack for pack in reversed(self.all) for key in pack.keys
        }
        self._files = {pack.file.name for pack in self.all} | {*self.damaged}

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

    def __contains__(self, name: str) -> bool:
        """Return whether a file is a pack."""
        return name in self._files

    def classify(self, needed: Set[str], is_old: Callable[[str], bool]) -> None:
        """Find the packs that nothing needs.

        Args:
            needed: Keys that users need.
            is_old: Returns whether a file is older than the grace period.
        """
        for pack in self.all:
            if not pack.is_needed(needed):
                (self.old if is_old(pack.file.name) else self.young).append(pack)


def delete_single(cache: CacheFolder, packs: Packs, *, log: Log) -> dict[str, int]:
    """Delete single entries after verifying their copies in packs; return the deleted files and their sizes.

    A single entry with a damaged copy stays. Of several copies, the one that readers use is verified.

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
        try:
            problems = wrong_members(cache, pack.kind, pack.file)
        except FileNotFoundError:
            continue  # deleted since the survey
        kept = {name for name in pack.single if _key_of(name) in problems}
        if problems:
            entries = counted(len(problems), "damaged entry", "damaged entries")
            log(
                f"warning: a pack has {entries}: {cache.where(pack.file.name)}. {len(kept)} of them also in "
                "single files, which stay. Run latentline verify --repair for the recipes"
            )
        deleted |= delete_files(cache, {name: size for name, size in pack.single.items() if name not in kept})
    return deleted


def _key_of(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(SUFFIX)


def delete_old(cache: CacheFolder, packs: Packs, needed: Callable[[], Set[str]]) -> dict[str, int]:
    """Delete packs that nothing needs; return the deleted files and their sizes.

    Args:
        cache: Files of the cache.
        packs: Packs to delete.
        needed: Returns the keys that users need now; a job may have started since the survey.

    Raises:
        StoreError: See `needed` and `delete_files`.
    """
    deleted: dict[str, int] = {}
    for start in range(0, len(packs.old), _PACKS_AT_ONCE):
        needed_now = needed()
        batch = [pack for pack in packs.old[start : start + _PACKS_AT_ONCE] if not pack.is_needed(needed_now)]
        deleted |= delete_files(cache, {pack.file.name: pack.num_bytes for pack in batch})
    return deleted
