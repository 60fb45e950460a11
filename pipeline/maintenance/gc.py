"""Entries that nobody needs any more, and what interrupted writers left: found, and deleted on demand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import polars as pl

from pipeline.cache.folder import CacheFile, cache_folder
from pipeline.cache.store import KINDS, SUFFIX
from pipeline.cache.users import FOLDER, CacheUser, read_users
from pipeline.errors import StoreError, TableError
from pipeline.storage.addresses import Address
from pipeline.storage.atomic import is_temp_name
from pipeline.storage.tables import Tables
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.samples import read_entry_keys

GRACE_S = 24 * 3600.0
"""An entry younger than this is nobody's orphan: who wanted it may not have said so yet."""

_DELETED_AT_A_TIME = 500
"""Between two looks at who needs what."""


@dataclass
class Survey:
    """What lies in a cache.

    Attributes:
        users: Output folders that registered, by name.
        entries: Number of entries.
        entry_bytes: Of all of them.
        orphans: Entries that no user needs and that are older than the grace period, with their bytes.
        young: Entries that no user needs, within the grace period.
        leftovers: Temporary files older than the grace period, with their bytes.
        foreign: Files that Latentline did not put there; they are never touched.

    Files are named by their place below the cache. One whose age its service does not tell counts as young.
    """

    users: list[CacheUser] = field(default_factory=list[CacheUser])
    entries: int = 0
    entry_bytes: int = 0
    orphans: dict[str, int] = field(default_factory=dict[str, int])
    young: int = 0
    leftovers: dict[str, int] = field(default_factory=dict[str, int])
    foreign: list[str] = field(default_factory=list[str])


def survey(cache_dir: Address, *, grace_s: float = GRACE_S) -> Survey:
    """Look at every file of a cache; nothing is changed.

    An entry is needed when a registered output folder asked for it in its last jobs, when one of its tables
    names it, or when a run of its that is not finished trains on it.

    Raises:
        StoreError: A registration or table cannot be read, so that nobody knows what it needs; or the cache
            cannot be listed.
    """
    found = Survey(users=list(read_users(cache_dir)))
    needed = _needed(found.users)
    oldest_kept_s = time.time() - grace_s
    for file in _files(cache_dir):
        place = PurePosixPath(file.name)
        old = file.modified_s is not None and file.modified_s < oldest_kept_s
        if _is_entry(place):
            found.entries += 1
            found.entry_bytes += file.num_bytes
            if place.stem not in needed:
                found.young += not old
                if old:
                    found.orphans[file.name] = file.num_bytes
        elif _is_leftover(place):
            if old:
                found.leftovers[file.name] = file.num_bytes
        elif not _is_ours(place):
            found.foreign.append(file.name)
    return found


def delete(cache_dir: Address, found: Survey) -> tuple[int, int]:
    """Delete the survey's orphans and leftovers, but for those that somebody has asked for since.

    Returns:
        How many files, and their bytes.

    Raises:
        StoreError: A registration cannot be read, or a file cannot be deleted.
    """
    cache = cache_folder(cache_dir)
    waste = {**found.orphans, **found.leftovers}
    files = bytes_freed = 0
    for names in _some_at_a_time(sorted(waste)):
        needed = _needed(read_users(cache_dir))  # asked again: a job may have begun
        for name in names:
            place = PurePosixPath(name)
            if place.suffix == SUFFIX and place.stem in needed:
                continue
            try:
                cache.delete(name)
            except FileNotFoundError:
                continue
            except OSError as err:
                fix = "see that cache_dir may be written by this user"
                what = f"an orphan cannot be deleted: {err.strerror or err}"
                raise StoreError(what, where=cache.where(name), fix=fix) from err
            files += 1
            bytes_freed += waste[name]
        cache.tidy(sorted({str(PurePosixPath(name).parent) for name in names}))
    return files, bytes_freed


def _some_at_a_time(names: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), _DELETED_AT_A_TIME):
        yield names[start : start + _DELETED_AT_A_TIME]


def _files(cache_dir: Address) -> Iterator[CacheFile]:
    cache = cache_folder(cache_dir)
    try:
        yield from cache.files()
    except OSError as err:
        fix = "see that cache_dir may be read by this user"
        raise StoreError(f"the cache cannot be listed: {err}", where=cache.where(""), fix=fix) from err


def _is_entry(place: PurePosixPath) -> bool:
    """Whether the file lies where an entry of its name would."""
    named = place.suffix == SUFFIX and len(place.stem) == 64
    return named and len(place.parts) == 3 and place.parts[0] in KINDS and place.parts[1] == place.stem[:2]


def _is_leftover(place: PurePosixPath) -> bool:
    """Whether a writer of ours left the file: it is named as they name theirs, where they write."""
    *folders, name = place.parts
    beside_entries = len(folders) == 2 and folders[0] in KINDS and len(folders[1]) == 2
    return is_temp_name(name) and (folders in ([], [FOLDER]) or beside_entries)


def _is_ours(place: PurePosixPath) -> bool:
    """Whether it is a registration, or what is remembered of this machine."""
    if len(place.parts) == 1:
        return place.suffix == ".json"
    return len(place.parts) == 2 and place.parts[0] == FOLDER and place.suffix in {".json", ".keys"}


def _needed(users: Iterable[CacheUser]) -> set[str]:
    needed: set[str] = set()
    for user in users:
        needed |= user.keys | _in_tables(user.output_dir) | _in_runs(user.output_dir)
    return needed


def _in_tables(output_dir: Path) -> set[str]:
    tables = Tables(output_dir)
    keys: set[str] = set()
    for asset in ("vae_latents", "text_embeddings"):
        path = tables.path(asset)
        if path.is_file():
            keys |= _readable(path, lambda table: set(pl.read_parquet(table, columns=["key"])["key"]))
    return keys


def _in_runs(output_dir: Path) -> set[str]:
    """Keys that runs which have begun and not finished train on."""
    keys: set[str] = set()
    for inputs in output_dir.glob("runs/*/inputs.parquet"):
        if not RunLayout(inputs.parent).finished.exists():
            keys |= _readable(inputs, read_entry_keys)
    return keys


def _readable(path: Path, keys: Callable[[Path], set[str]]) -> set[str]:
    try:
        return keys(path)
    except (OSError, pl.exceptions.PolarsError) as err:
        fix = "run the recipe's job again, which writes it anew, or delete the file"
        what = f"a table cannot be read, so that nobody knows which entries it names: {err}"
        raise TableError(what, where=str(path), fix=fix) from err
