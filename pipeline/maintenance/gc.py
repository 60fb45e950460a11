"""Garbage collection: find cache entries that no recipe needs and files left by interrupted writers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import polars as pl

from pipeline.cache.folder import CacheFile, CacheFolder, cache_folder
from pipeline.cache.pack_format import CHANGED, PACKS, is_pack_file
from pipeline.cache.store import KINDS, SUFFIX
from pipeline.cache.users import FOLDER, CacheUser, access_fix, read_users
from pipeline.encoding.shared_order import ORDERS
from pipeline.errors import StoreError, TableError
from pipeline.maintenance.gc_packs import Packs, delete_old, delete_single
from pipeline.recipe import project_root
from pipeline.recipe.outputs import MERGED_REJECTIONS
from pipeline.recipe.scratch import working_copy
from pipeline.reporting.reports import Log, discard
from pipeline.storage.addresses import Address
from pipeline.storage.atomic import is_temp_name
from pipeline.storage.mirror import Mirror
from pipeline.storage.tables import Tables, read_rows
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.samples import read_entry_keys

GRACE_S = 24 * 3600.0
"""Age below which an entry is never an orphan: the job that needs it may not have registered it yet."""

_DELETE_BATCH = 500
"""Number of files that are deleted before the users' keys are read again."""


@dataclass
class Survey:
    """Contents of a cache. Files are named by their path below the cache.

    Attributes:
        users: Registered output folders, by name.
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
    or if an unfinished run there trains on it.

    Raises:
        StoreError: The cache cannot be listed, or a registration cannot be read.
        TableError: A table of a registered output folder cannot be read.
    """
    result = Survey(_read_packs(cache_dir), users=list(read_users(cache_dir)))
    needed = _needed_keys(result.users)
    oldest_kept_s = time.time() - grace_s

    # An order is old only if all of its files are, so these are classified together. So are packs.
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
        elif result.packs.is_complete(file.name):
            old_pack_files |= {file.name} if is_old else set()
        elif _is_leftover(path) or is_pack_file(path):
            if is_old:
                result.leftovers[file.name] = file.num_bytes
        elif not _is_bookkeeping(path):
            result.foreign.append(file.name)

    result.add_orders(orders, oldest_kept_s)
    result.packs.classify(needed, old_pack_files.__contains__)
    return result


def delete(cache_dir: Address, surveyed: Survey, *, log: Log = discard) -> tuple[int, int]:
    """Delete the survey's orphans, leftovers and old orders, except entries that a user has requested since.

    Single entries that packs hold are deleted too, and packs that no user needs. `log` receives warnings
    about damaged packs.

    Returns:
        Number of deleted files, and their total size in bytes.

    Raises:
        StoreError: A registration cannot be read, or a file cannot be deleted.
        TableError: A table of a registered output folder cannot be read.
    """
    cache = cache_folder(cache_dir)
    try:
        deleted = delete_single(cache, surveyed.packs, log=log)
        deleted |= delete_old(cache, surveyed.packs, lambda: _needed_keys(read_users(cache_dir)))
    except OSError as err:
        raise StoreError(
            f"a pack or an entry in a pack cannot be read or deleted: {err.strerror or err}",
            where=cache.where(PACKS),
            fix=access_fix(cache_dir, err),
        ) from err
    cache.tidy(sorted({str(PurePosixPath(name).parent) for name in deleted}, reverse=True))

    sizes = {**surveyed.orphans, **surveyed.leftovers, **surveyed.old_orders}
    names = sorted(sizes)
    num_files, num_bytes = len(deleted), sum(deleted.values())

    for start in range(0, len(names), _DELETE_BATCH):
        batch = names[start : start + _DELETE_BATCH]
        # A job may have started since the survey, and may need entries that were orphans then.
        needed = _needed_keys(read_users(cache_dir))

        for name in batch:
            path = PurePosixPath(name)
            if path.suffix == SUFFIX and path.stem in needed:
                continue
            try:
                cache.delete(name)
            except FileNotFoundError:
                continue
            except OSError as err:
                raise StoreError(
                    f"an orphan cannot be deleted: {err.strerror or err}",
                    where=cache.where(name),
                    fix=access_fix(cache_dir, err),
                ) from err
            num_files += 1
            num_bytes += sizes[name]

        cache.tidy(sorted({str(PurePosixPath(name).parent) for name in batch}, reverse=True))
    return num_files, num_bytes


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
    """Return whether the path is a user's registration, state of this machine, or the state of the packs."""
    if len(path.parts) == 1:
        return path.suffix == ".json"
    if path.parts[0] == PACKS:
        return len(path.parts) == 3 and path.parts[1] in KINDS and path.name == CHANGED
    return len(path.parts) == 2 and path.parts[0] == FOLDER and path.suffix in {".json", ".keys"}


def _needed_keys(users: Iterable[CacheUser]) -> set[str]:
    needed: set[str] = set()
    for user in users:
        output_dir = _local_outputs(user)
        needed |= user.keys | _keys_in_tables(output_dir) | _keys_in_runs(output_dir)
    return needed


def _local_outputs(user: CacheUser) -> Path:
    """Return the user's output folder, or the working copy of one at an address with its current files.

    Raises:
        StoreError: The address cannot be read, so the needed entries are unknown.
    """
    output_dir = working_copy(user.recipe, user.output_dir, project_root())
    mirror = Mirror(user.output_dir, output_dir)
    mirror.pull("tables/*.parquet", f"!{MERGED_REJECTIONS}", "runs/*/inputs.parquet", "runs/*/finished.json")
    return output_dir


def _keys_in_tables(output_dir: Path) -> set[str]:
    tables = Tables(output_dir)
    keys: set[str] = set()
    for asset in ("vae_latents", "text_embeddings"):
        path = tables.path(asset)
        if path.is_file():
            keys |= _read_keys(path, _keys_in_table)
    return keys


def _keys_in_table(path: Path) -> set[str]:
    table = read_rows(path, {"key", "mask_key", "reference_keys"})
    # `reference_keys` holds several keys, separated by spaces.
    return {key for column in table for text in column.drop_nulls() for key in text.split()}


def _keys_in_runs(output_dir: Path) -> set[str]:
    """Return the keys of all entries that unfinished runs train on."""
    keys: set[str] = set()
    for inputs in output_dir.glob("runs/*/inputs.parquet"):
        if not RunLayout(inputs.parent).finished.exists():
            keys |= _read_keys(inputs, read_entry_keys)
    return keys


def _read_keys(path: Path, read: Callable[[Path], set[str]]) -> set[str]:
    try:
        return read(path)
    except (OSError, pl.exceptions.PolarsError) as err:
        raise TableError(
            f"a table cannot be read, so the entries that it needs are unknown: {err}",
            where=str(path),
            fix="start the recipe's job again, which replaces the table; if you delete the file instead, gc "
            "may delete entries that only this table needs",
        ) from err
