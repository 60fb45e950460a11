"""Entries that nobody needs any more, and what interrupted writers left: found, and deleted on demand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from pipeline.atomic import TEMP_SUFFIX
from pipeline.errors import StoreError, TableError
from pipeline.registry import FOLDER, Registered, registered
from pipeline.runs import RunLayout
from pipeline.store import KINDS, SUFFIX
from pipeline.tables import Tables
from pipeline.training.inputs import keys_named

GRACE_S = 24 * 3600.0
"""An entry younger than this is nobody's orphan: who wanted it may not have said so yet."""


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
    """

    users: list[Registered] = field(default_factory=list[Registered])
    entries: int = 0
    entry_bytes: int = 0
    orphans: dict[Path, int] = field(default_factory=dict[Path, int])
    young: int = 0
    leftovers: dict[Path, int] = field(default_factory=dict[Path, int])
    foreign: list[Path] = field(default_factory=list[Path])


def survey(cache_dir: Path, *, grace_s: float = GRACE_S) -> Survey:
    """Look at every file of a cache; nothing is changed.

    An entry is needed when a registered output folder asked for it in its last jobs, when one of its tables
    names it, or when a run of its that is not finished trains on it.

    Raises:
        StoreError: A registration or table cannot be read, so that nobody knows what it needs.
    """
    found = Survey(users=list(registered(cache_dir)))
    needed = _needed(found.users)
    newest_s = time.time() - grace_s
    for path in _files(cache_dir):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        if path.suffix == TEMP_SUFFIX:
            if stat.st_mtime < newest_s:
                found.leftovers[path] = stat.st_size
        elif not _is_entry(path):
            found.foreign.append(path)
        else:
            found.entries += 1
            found.entry_bytes += stat.st_size
            if path.stem in needed:
                continue
            if stat.st_mtime < newest_s:
                found.orphans[path] = stat.st_size
            else:
                found.young += 1
    return found


def delete(cache_dir: Path, found: Survey) -> tuple[int, int]:
    """Delete the survey's orphans and leftovers, but for those that somebody has asked for since.

    Returns:
        How many files, and their bytes.

    Raises:
        StoreError: A registration cannot be read, or a file cannot be deleted.
    """
    files = bytes_freed = 0
    for folder, paths in _by_folder([*found.orphans, *found.leftovers]):
        needed = _needed(registered(cache_dir))  # asked again: a job may have begun
        for path in paths:
            if path.suffix == SUFFIX and path.stem in needed:
                continue
            try:
                path.unlink()
            except FileNotFoundError:
                continue
            except OSError as err:
                fix = "see that cache_dir may be written by this user"
                what = f"an orphan cannot be deleted: {err.strerror or err}"
                raise StoreError(what, where=str(path), fix=fix) from err
            files += 1
            bytes_freed += found.orphans.get(path, found.leftovers.get(path, 0))
        with suppress(OSError):  # not empty, most often
            folder.rmdir()
    return files, bytes_freed


def _by_folder(paths: Iterable[Path]) -> Iterator[tuple[Path, list[Path]]]:
    folders: dict[Path, list[Path]] = {}
    for path in sorted(paths):
        folders.setdefault(path.parent, []).append(path)
    yield from folders.items()


def _files(cache_dir: Path) -> Iterator[Path]:
    """All that could be an entry or a writer's leftover, and what does not belong there."""
    for path in sorted(cache_dir.iterdir()) if cache_dir.is_dir() else ():
        if path.name in KINDS and path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.is_file())
        elif path.name == FOLDER and path.is_dir():
            yield from sorted(path.glob(f"*{TEMP_SUFFIX}"))
        elif path.is_file() and path.suffix == TEMP_SUFFIX:
            yield path
        elif path.is_dir() or path.suffix != ".json":
            yield from (
                sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else (path,)
            )


def _is_entry(path: Path) -> bool:
    """Whether the file lies where an entry of its name would."""
    named = path.suffix == SUFFIX and len(path.stem) == 64 and path.parent.name == path.stem[:2]
    return named and path.parents[1].name in KINDS


def _needed(users: Iterable[Registered]) -> set[str]:
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
            keys |= _readable(inputs, keys_named)
    return keys


def _readable(path: Path, keys: Callable[[Path], set[str]]) -> set[str]:
    try:
        return keys(path)
    except (OSError, pl.exceptions.PolarsError) as err:
        fix = "run the recipe's job again, which writes it anew, or delete the file"
        what = f"a table cannot be read, so that nobody knows which entries it names: {err}"
        raise TableError(what, where=str(path), fix=fix) from err
