"""Garbage collection: find cache entries that no recipe needs and files left by interrupted writers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from pipeline.cache.backends import cache_folder
from pipeline.cache.folder import CacheFile, CacheFolder
from pipeline.cache.packs import PACKS
from pipeline.cache.store import KINDS, SUFFIX
from pipeline.cache.users import FOLDER, CacheUser, access_fix
from pipeline.encoding.shared_order import ORDERS
from pipeline.errors import StoreError
from pipeline.maintenance.deletion import delete_files
from pipeline.maintenance.gc_packs import Packs, delete_old, delete_single
from pipeline.maintenance.needed_keys import NeededKeys, StaleRun, delete_stale
from pipeline.reporting.reports import Log, discard
from pipeline.storage.addresses import Address
from pipeline.storage.atomic import is_temp_name

GRACE_S = 24 * 3600.0
"""Age below which an entry is never an orphan: the job that needs it may not have registered it yet."""

_DELETE_BATCH = 500
"""Number of files that are deleted before the users' keys are read again."""


@dataclass
class Survey:
    """Contents of a cache. Files are named by their path below the cache.

    Attributes:
        users: Registered output folders, sorted by id.
        unreadable: Ids of the output folders that this user may not read, or not completely.
        stale_runs: Registrations of training runs that have finished or were deleted.
        entries: Number of single entries.
        entry_bytes: Size of all single entries.
        orphans: Size of each single entry that no user needs and that is older than the grace period.
        young: Number of single entries that no user needs within the grace period, or of unknown age.
        leftovers: Size of each temporary file older than the grace period.
        old_orders: Size of each file of an order whose newest file is older than the grace period.
        num_old_orders: Number of these orders.
        num_young_orders: Number of the other orders, which workers may be encoding.
        packs: Packs, and the single entries that packs also hold.
        foreign: Files that Latentline did not write and never touches.
    """

    packs: Packs
    users: list[CacheUser] = field(default_factory=list[CacheUser])
    unreadable: Set[str] = frozenset()
    stale_runs: list[StaleRun] = field(default_factory=list[StaleRun])
    entries: int = 0
    entry_bytes: int = 0
    orphans: dict[str, int] = field(default_factory=dict[str, int])
    young: int = 0
    leftovers: dict[str, int] = field(default_factory=dict[str, int])
    old_orders: dict[str, int] = field(default_factory=dict[str, int])
    num_old_orders: int = 0
    num_young_orders: int = 0
    foreign: list[str] = field(default_factory=list[str])

    def add_orders(self, orders: Mapping[str, Sequence[CacheFile]], oldest_kept_s: float) -> None:
        """Add orders, by id. One with a file of unknown age counts as young."""
        for files in orders.values():
            if all(file.modified_s is not None and file.modified_s < oldest_kept_s for file in files):
                self.num_old_orders += 1
                self.old_orders |= {file.name: file.num_bytes for file in files}
            else:
                self.num_young_orders += 1


def survey(cache_dir: Address, *, grace_s: float = GRACE_S) -> Survey:
    """Classify every file of a cache, without changing any.

    An entry is needed if the last jobs of a registered output folder requested it, if a table there names it,
    if an unfinished run there trains on it, or if a run is registered that reads it. Of a folder that this
    user may not read, only the registrations count.

    Raises:
        StoreError: The cache cannot be listed, or a registration cannot be read.
        TableError: A table of a registered output folder cannot be read.
    """
    result = Survey(_read_packs(cache_dir))
    needed_keys = NeededKeys(cache_dir)
    needed = needed_keys.read()
    result.users, result.unreadable = needed_keys.users, needed_keys.unreadable
    result.stale_runs = needed_keys.stale_runs
    oldest_kept_s = time.time() - grace_s

    # An order is old only if all of its files are, so these are classified together.
    orders: defaultdict[str, list[CacheFile]] = defaultdict(list)
    old_pack_files = set[str]()
    for file in _list_files(cache_dir):
        path = PurePosixPath(file.name)
        is_old = file.modified_s is not None and file.modified_s < oldest_kept_s
        if _is_entry(path):
            result.entries += 1
            result.entry_bytes += file.num_bytes
            if path.stem not in needed and is_old:
                result.orphans[file.name] = file.num_bytes
            elif result.packs.add_single(path.parts[0], path.stem, file):
                continue
            elif path.stem not in needed:
                result.young += 1
        elif path.parts[0] == ORDERS and len(path.parts) > 2:
            orders[path.parts[1]].append(file)
        elif file.name in result.packs:
            old_pack_files |= {file.name} if is_old else set()
        elif _is_leftover(path):
            if is_old:
                result.leftovers[file.name] = file.num_bytes
        elif not _is_bookkeeping(path):
            result.foreign.append(file.name)

    result.add_orders(orders, oldest_kept_s)
    result.packs.classify(needed, old_pack_files.__contains__)
    return result


def delete(cache_dir: Address, surveyed: Survey, *, log: Log = discard) -> tuple[int, int]:
    """Delete the survey's orphans, leftovers and old orders, except entries that a user has requested since.

    Single entries that packs hold are deleted too, packs that no user needs, and registrations of runs that
    need nothing any more. `log` receives warnings about damaged packs.

    Returns:
        Number of deleted files, and their total size in bytes.

    Raises:
        StoreError: A registration cannot be read, or a file cannot be deleted.
        TableError: A table of a registered output folder cannot be read.
    """
    cache, needed_keys = cache_folder(cache_dir), NeededKeys(cache_dir)
    unregistered = [stale.num_bytes for stale in surveyed.stale_runs if delete_stale(cache_dir, stale)]
    leftovers = {**surveyed.leftovers, **surveyed.old_orders}
    try:
        deleted = delete_single(cache, surveyed.packs, log=log)
        deleted |= delete_old(cache, surveyed.packs, needed_keys.read)
    except OSError as err:
        raise StoreError(
            f"a pack cannot be read: {err.strerror or err}",
            where=cache.where(PACKS),
            fix=access_fix(cache_dir, err),
        ) from err

    names = sorted(surveyed.orphans)
    for start in range(0, len(names), _DELETE_BATCH):
        # A job may have started since the survey, and may need entries that were orphans then.
        needed = needed_keys.read()
        batch = [name for name in names[start : start + _DELETE_BATCH] if _key_of(name) not in needed]
        deleted |= delete_files(cache, {name: surveyed.orphans[name] for name in batch})

    deleted |= delete_files(cache, leftovers)
    cache.tidy(sorted({str(PurePosixPath(name).parent) for name in deleted}, reverse=True))
    return len(deleted) + len(unregistered), sum(deleted.values()) + sum(unregistered)


def _key_of(name: str) -> str:
    return PurePosixPath(name).stem


def _read_packs(cache_dir: Address) -> Packs:
    cache = cache_folder(cache_dir)
    try:
        return Packs(cache)
    except OSError as err:
        raise _listing_error(cache, err) from err


def _list_files(cache_dir: Address) -> Iterator[CacheFile]:
    cache = cache_folder(cache_dir)
    try:
        yield from cache.files()
    except OSError as err:
        raise _listing_error(cache, err) from err


def _listing_error(cache: CacheFolder, err: OSError) -> StoreError:
    return StoreError(
        f"the cache cannot be listed: {err}",
        where=cache.where(""),
        fix=access_fix(cache.address, err),
    )


def _is_entry(path: PurePosixPath) -> bool:
    """Return whether the path is `<kind>/<first two digits>/<key>.safetensors`."""
    if path.suffix != SUFFIX or len(path.stem) != 64 or len(path.parts) != 3:
        return False
    return path.parts[0] in KINDS and path.parts[1] == path.stem[:2]


def _is_leftover(path: PurePosixPath) -> bool:
    """Return whether the path has the name of a temporary file, in a folder that Latentline writes to."""
    *folders, name = path.parts
    in_entry_folder = len(folders) == 2 and folders[0] in KINDS and len(folders[1]) == 2
    in_pack_folder = len(folders) == 2 and folders[0] == PACKS and folders[1] in KINDS
    return is_temp_name(name) and (folders in ([], [FOLDER]) or in_entry_folder or in_pack_folder)


def _is_bookkeeping(path: PurePosixPath) -> bool:
    """Return whether the path is a user's registration or state of this machine."""
    if len(path.parts) == 1:
        return path.suffix == ".json"
    return len(path.parts) == 2 and path.parts[0] == FOLDER and path.suffix in {".json", ".keys"}
