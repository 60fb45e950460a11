"""Packs in a garbage collection: single entries with a copy in a pack, and packs that no job uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipeline.cache import packs as cache_packs
from pipeline.cache.entry_format import KINDS, Kind
from pipeline.cache.folder import CacheFolder
from pipeline.cache.packs import list_packs, wrong_members
from pipeline.cache.store import SUFFIX
from pipeline.cache.used_keys import Keys, UsedKeys, are_in, key_array
from pipeline.errors import counted
from pipeline.log import Log
from pipeline.maintenance.deletion import delete_files

_PACKS_AT_ONCE = 64
"""Number of packs that are deleted before the lists of used keys are read again."""


@dataclass(eq=False)
class Pack:
    """A pack with a valid header.

    Attributes:
        kind: Kind of its entries.
        file: The pack's file and keys.
        num_bytes: Size of the pack.
        keys: Keys of its entries.
        single: Files of entries that the pack also holds, and their sizes.
    """

    kind: Kind
    file: cache_packs.Pack
    num_bytes: int
    keys: Keys
    single: dict[str, int] = field(default_factory=dict[str, int])

    def is_used(self, used: Keys) -> bool:
        """Return whether one of the keys is used."""
        return bool(are_in(self.keys, used).any())


class Packs:
    """Packs of a cache as `latentline gc` classifies them.

    Attributes:
        all: Packs with a valid header.
        young: Packs without a used entry that were written recently, or at an unknown time.
        old: Packs without a used entry that are older.
        damaged: Packs with a damaged header. They are never deleted.
    """

    def __init__(self, cache: CacheFolder) -> None:
        """List the packs and read their headers; raises OSError as `list_packs`."""
        self.all: list[Pack] = []
        self.young: list[Pack] = []
        self.old: list[Pack] = []
        self.damaged: list[str] = []
        for kind in KINDS:
            for pack in list_packs(cache, kind):
                if pack.problem:
                    self.damaged.append(pack.name)
                else:
                    self.all.append(Pack(kind, pack, pack.stat[0], key_array(pack.keys)))
        self._lookups = {kind: _Lookup([pack for pack in self.all if pack.kind == kind]) for kind in KINDS}
        self._files = {pack.file.name for pack in self.all} | {*self.damaged}

    @property
    def num_entries(self) -> int:
        """Number of entries; an entry in several packs counts once."""
        return sum(lookup.num_keys for lookup in self._lookups.values())

    @property
    def single(self) -> dict[str, int]:
        """Size of each single entry that a pack also holds, by path."""
        return {name: size for pack in self.all for name, size in pack.single.items()}

    def holders(self, kind: str, keys: Keys) -> list[Pack | None]:
        """Return the pack that holds each entry, None without one. Of several, readers use the first one."""
        return self._lookups[kind].holders(keys) if len(keys) else []

    def __contains__(self, name: str) -> bool:
        """Return whether a file is a pack."""
        return name in self._files

    def classify(self, used: Keys, is_old: Callable[[str], bool]) -> None:
        """Find the packs without a used entry; `is_old` returns whether a file may be deleted by its age."""
        for pack in self.all:
            if not pack.is_used(used):
                (self.old if is_old(pack.file.name) else self.young).append(pack)


class _Lookup:
    def __init__(self, packs: list[Pack]) -> None:
        self._packs = packs
        keys = np.concatenate([key_array([]), *(pack.keys for pack in packs)])
        numbers = np.repeat(np.arange(len(packs)), [len(pack.keys) for pack in packs])
        # np.unique returns the first of equal keys, so the first pack.
        self._keys, first = np.unique(keys, return_index=True)
        self._numbers: npt.NDArray[np.intp] = numbers[first]

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    def holders(self, keys: Keys) -> list[Pack | None]:
        is_held = are_in(keys, self._keys)
        at = np.searchsorted(self._keys, keys)
        return [self._packs[self._numbers[n]] if held else None for n, held in zip(at, is_held, strict=True)]


def delete_single(cache: CacheFolder, packs: Packs, *, log: Log) -> dict[str, int]:
    """Delete single entries after verifying their copies in packs; return the deleted files and their sizes.

    A single entry with a damaged copy stays. Of several copies, the one that readers use is verified. `log`
    receives a line for each pack with damaged entries.

    Raises:
        OSError: A file cannot be read or deleted.
    """
    deleted: dict[str, int] = {}
    for pack in packs.all:
        if not pack.single:
            continue
        # Before the deletion, so that every used entry stays readable wherever this process is killed.
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


def delete_old(cache: CacheFolder, packs: Packs, used: UsedKeys) -> dict[str, int]:
    """Delete packs without a used entry; return the deleted files and their sizes.

    Raises:
        StoreError: See `UsedKeys.deleting` and `delete_files`.
    """
    deleted: dict[str, int] = {}
    for start in range(0, len(packs.old), _PACKS_AT_ONCE):
        # A job may have started since the survey, and may use entries of packs that were unused then.
        with used.deleting() as until_s:
            batch = [
                pack for pack in packs.old[start : start + _PACKS_AT_ONCE] if not pack.is_used(used.keys)
            ]
            files = {pack.file.name: pack.num_bytes for pack in batch}
            deleted |= delete_files(cache, files, until_s=until_s)
    return deleted
