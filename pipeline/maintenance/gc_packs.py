"""Packs in a garbage collection: single entries with a copy in a pack, and packs that no recipe needs.

The order of the steps keeps every needed entry readable, wherever a process is killed. A single entry is
deleted after its packed copy was read and verified, and after readers were made to list the packs again. The
index of a pack is deleted before the pack, and is written again if a job has requested an entry meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from pipeline.cache.entry_format import KINDS, Kind
from pipeline.cache.folder import CacheFile, CacheFolder, FileStat
from pipeline.cache.pack_format import (
    INDEX_SUFFIX,
    PACK_SUFFIX,
    WrongPackError,
    bad_entries,
    index_path,
    is_pack_file,
    pack_folder,
    pack_path,
)
from pipeline.cache.pack_index import announce_change, read_index, remove_rows
from pipeline.cache.store import SUFFIX
from pipeline.errors import counted
from pipeline.maintenance.deletion import delete_files
from pipeline.reporting.reports import Log

_PACKS_AT_ONCE = 64
"""Number of packs that are deleted before the users' keys are read again."""


@dataclass(eq=False)
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
        incomplete: Stats of the packs without an index, and of the indexes without a pack, by path.
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
        self.incomplete: dict[str, FileStat] = {}
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
        self.incomplete |= _incomplete(kind, files)
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
    announced = set[Kind]()
    for pack in packs.all:
        if not pack.single:
            continue
        valid_keys = _verified_keys(cache, pack, log)
        if pack.kind not in announced:
            announce_change(cache, pack.kind)
            announced.add(pack.kind)
        valid = {name: size for name, size in pack.single.items() if _key_of(name) in valid_keys}
        deleted |= delete_files(cache, valid)
    return deleted


def _key_of(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(SUFFIX)


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
        num_single = len(problems.keys() & set(map(_key_of, pack.single)))
        where = cache.where(pack_path(pack.kind, pack.name))
        log(
            f"warning: a pack has {entries}, which now count as missing in it: {where}. {num_single} of them "
            "also in a file of its own, which stays. Start the cache jobs of the recipes again: they encode "
            "entries that are missing"
        )
    return set(index["key"]) - problems.keys()


def delete_old(cache: CacheFolder, packs: Packs, needed: Callable[[], Set[str]]) -> dict[str, int]:
    """Delete packs that nothing needs; return the deleted files and their sizes.

    Args:
        cache: Files of the cache.
        packs: Packs to delete.
        needed: Returns the keys that users need now; a job may have started since the survey.

    Raises:
        OSError: A file cannot be read or deleted.
        StoreError: See `needed` and `delete_files`.
    """
    deleted: dict[str, int] = {}
    for kind in KINDS:
        own = [pack for pack in packs.old if pack.kind == kind]
        for start in range(0, len(own), _PACKS_AT_ONCE):
            needed_now = needed()
            batch = own[start : start + _PACKS_AT_ONCE]
            unneeded = [pack for pack in batch if not pack.is_needed(needed_now)]
            if unneeded:
                deleted |= _delete_packs(cache, kind, unneeded, needed)
    return deleted


def _delete_packs(
    cache: CacheFolder, kind: Kind, packs: Sequence[Pack], needed: Callable[[], Set[str]]
) -> dict[str, int]:
    with ThreadPoolExecutor(_PACKS_AT_ONCE // 4, thread_name_prefix="latentline-gc") as pool:
        indexes = list(pool.map(lambda pack: _read_if_exists(cache, pack.files[0]), packs))
    removed = {pack: index for pack, index in zip(packs, indexes, strict=True) if index is not None}

    restored = dict(removed)
    try:
        deleted = delete_files(cache, {pack.files[0]: 0 for pack in removed})
        # Readers stop using the packs before these are deleted.
        announce_change(cache, kind)
        # A job that registered before the indexes were deleted may have seen its entries in these packs.
        needed_now = needed()
        restored = {pack: index for pack, index in removed.items() if pack.is_needed(needed_now)}
    finally:
        for pack, index in restored.items():
            cache.replace(pack.files[0], index)
        if restored:
            announce_change(cache, kind)

    packs_left = {pack.files[1]: pack.num_bytes for pack in removed if pack not in restored}
    kept = {pack.files[0] for pack in restored}
    deleted = {name: size for name, size in deleted.items() if name not in kept}
    return deleted | delete_files(cache, packs_left)


def _read_if_exists(cache: CacheFolder, name: str) -> bytes | None:
    try:
        return cache.read(name)
    except FileNotFoundError:
        return None


def delete_incomplete(cache: CacheFolder, packs: Packs, sizes: Mapping[str, int]) -> dict[str, int]:
    """Delete packs without an index and indexes without a pack; return the deleted files and their sizes.

    Sealing the same entries again completes a pack under the same name. So the packs are listed again, and
    only files that are unchanged since the survey and still incomplete are deleted.

    Args:
        cache: Files of the cache.
        packs: Packs at the time of the survey.
        sizes: Size of each file to delete, by name.

    Raises:
        OSError: The packs cannot be listed.
        StoreError: See `delete_files`.
    """
    deleted: dict[str, int] = {}
    for kind in KINDS:
        names = [name for name in sizes if name.startswith(f"{pack_folder(kind)}/")]
        if names:
            # An open reader may have loaded an index that was deleted since.
            announce_change(cache, kind)
        for start in range(0, len(names), _PACKS_AT_ONCE):
            now = _incomplete(kind, cache.stats(pack_folder(kind)))
            batch = names[start : start + _PACKS_AT_ONCE]
            unchanged = [name for name in batch if name in now and now[name] == packs.incomplete.get(name)]
            deleted |= delete_files(cache, {name: sizes[name] for name in unchanged})
    return deleted


def _incomplete(kind: Kind, files: Mapping[str, FileStat]) -> dict[str, FileStat]:
    """Return the packs without an index and the indexes without a pack, by path, with their stats."""
    partners = {PACK_SUFFIX: INDEX_SUFFIX, INDEX_SUFFIX: PACK_SUFFIX}
    incomplete: dict[str, FileStat] = {}
    for name, stat in files.items():
        path = PurePosixPath(pack_folder(kind), name)
        if is_pack_file(path) and f"{path.stem}{partners[path.suffix]}" not in files:
            incomplete[str(path)] = stat
    return incomplete
