"""The cache entries that output folders need, from their registrations, tables and unfinished runs.

A registration of a training run counts until the run has finished or was deleted. Only a process that can
read the run's output folder can see that. For all others, the registration counts as long as it exists.

An output folder that this user may not read counts like one on another machine: what it has registered is
needed, and nothing that belongs to it is deleted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from pipeline.cache.users import CacheUser, Registrations, known_user_id, unregister_run
from pipeline.errors import TableError, TrainingError
from pipeline.outputs.folder import OutputFolder
from pipeline.recipe import project_root
from pipeline.recipe.load import working_copy
from pipeline.storage.addresses import Address, Url
from pipeline.storage.tables import Tables, read_rows
from pipeline.trained_lora.run_folder import RunLayout, hold_idle_run, run_folder
from pipeline.trained_lora.run_upload import LEASE_FILE
from pipeline.trained_lora.samples import read_entry_keys


@dataclass(frozen=True)
class StaleRun:
    """A registration of a training run that has finished or was deleted."""

    output_dir: Address
    run: str
    num_bytes: int = field(default=0, compare=False)


class NeededKeys:
    """Keys that the users of a cache need; they are determined again by each `read`.

    Attributes:
        users: Registered output folders as of the last `read`.
        unreadable: Ids of those that this user may not read, or not completely.
        stale_runs: Registrations of runs that need nothing any more, as of the last `read`.
    """

    def __init__(self, cache_dir: Address) -> None:
        """Use the registrations in a cache; nothing is read yet."""
        self.users: list[CacheUser] = []
        self.unreadable = set[str]()
        self.stale_runs: list[StaleRun] = []
        self._registrations = Registrations(cache_dir)
        self._file_keys: dict[Path, tuple[tuple[int, int, int], frozenset[str]]] = {}
        self._parts: list[frozenset[str]] = []
        self._keys: frozenset[str] = frozenset()

    def read(self) -> Set[str]:
        """Return the keys that are needed now. Files whose stat is unchanged are not read again.

        Raises:
            StoreError: A registration or an address of outputs cannot be read.
            TableError: A table of a registered output folder cannot be read.
        """
        self.users = self._registrations.read()
        self.unreadable, self.stale_runs = set(), []
        parts: list[frozenset[str]] = []
        for user in self.users:
            parts += [*user.job_keys.values(), *self._keys_in_outputs(user)]
            for run, keys in user.run_keys.items():
                if _is_same_folder(user) and _is_stale(user.output_dir, run):
                    self.stale_runs.append(StaleRun(user.output_dir, run, 32 * len(keys)))
                else:
                    parts.append(keys)

        # Millions of keys are merged only if one of the files has changed.
        if len(parts) != len(self._parts) or any(map(_is_other, parts, self._parts)):
            self._parts, self._keys = parts, frozenset().union(*parts)
        return self._keys

    def _keys_in_outputs(self, user: CacheUser) -> list[frozenset[str]]:
        """Return the keys in tables and unfinished runs of an output folder, as far as it can be read."""
        output_dir = _local_outputs(user)
        parts: list[frozenset[str]] = []
        for table in map(Tables(output_dir).path, ("vae_latents", "text_embeddings")):
            with self._refusal_recorded(user):
                parts += self._keys_in_file(table, _keys_in_table)

        runs: list[Path] = []
        with self._refusal_recorded(user):
            runs = _subfolders(output_dir / "runs")
        for run in runs:
            with self._refusal_recorded(user):
                if _stat_or_none(RunLayout(run).finished) is None:
                    parts += self._keys_in_file(run / "inputs.parquet", read_entry_keys)
        return parts

    @contextmanager
    def _refusal_recorded(self, user: CacheUser) -> Generator[None]:
        try:
            yield
        except PermissionError:
            self.unreadable.add(user.id)

    def _keys_in_file(self, path: Path, read: Callable[[Path], set[str]]) -> list[frozenset[str]]:
        """Return the keys in a file; none if it does not exist.

        Raises:
            PermissionError: This user may not read it.
            TableError: It cannot be read for another reason.
        """
        try:
            stat = _stat_or_none(path)
            if stat is None:
                return []
            state = stat.st_size, stat.st_mtime_ns, stat.st_ino
            known = self._file_keys.get(path)
            if known is None or known[0] != state:
                self._file_keys[path] = known = state, frozenset(read(path))
            return [known[1]]
        except PermissionError:
            raise
        except (OSError, pl.exceptions.PolarsError) as err:
            raise TableError(
                f"a table cannot be read, so the entries that it needs are unknown: {err}",
                where=str(path),
                fix="start the recipe's job again, which replaces the table; if you delete the file instead, "
                "gc may delete entries that only this table needs",
            ) from err


def delete_stale(cache_dir: Address, stale: StaleRun) -> bool:
    """Delete the registration of a finished or deleted run, unless its training has started again.

    Returns:
        Whether the registration was deleted.

    Raises:
        StoreError: The registration cannot be deleted.
    """
    output_dir, run = stale.output_dir, stale.run
    lock = nullcontext()
    if isinstance(output_dir, Path) and (folder := run_folder(output_dir, run)).is_dir():
        # A training holds this lock from before its registration until after its end.
        lock = hold_idle_run(RunLayout(folder))
    try:
        with lock:
            return _is_stale(output_dir, run) and unregister_run(cache_dir, output_dir, run)
    except TrainingError:
        return False  # it is being trained
    except PermissionError:
        return False  # this user may not open the lock, so the run may be in training


def _is_stale(output_dir: Address, run: str) -> bool:
    """Return whether the files of a run show that it has finished or was deleted.

    Before a training registers, it holds the lease of an address, or has written `run.json` and deleted
    `finished.json` in a local folder.

    Raises:
        StoreError: The address cannot be read.
    """
    layout = RunLayout(run_folder(Path(), run))
    if isinstance(output_dir, Url):
        top = layout.folder.as_posix()
        names = {name.removeprefix(f"{top}/") for name in OutputFolder(output_dir, Path()).names(top)}
        is_unfinished = layout.facts.name in names and layout.finished.name not in names
        return LEASE_FILE not in names and not is_unfinished

    layout = RunLayout(run_folder(output_dir, run))
    try:
        return _stat_or_none(layout.facts) is None or _stat_or_none(layout.finished) is not None
    except PermissionError:
        return False


def _subfolders(folder: Path) -> list[Path]:
    """Return the sorted paths in a folder; none if it does not exist.

    `Path.glob` would hide that this user may not read the folder.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(folder.iterdir())
    return []


def _stat_or_none(path: Path) -> os.stat_result | None:
    """Return the stat of a file; None if it does not exist.

    Some versions of Python raise PermissionError in `Path.is_file`, and others return False.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        return path.stat()
    return None


def _is_same_folder(user: CacheUser) -> bool:
    """Return whether this machine can read the output folder that was registered.

    Another machine with the same path, and even the same host name, has another id.
    """
    try:
        return known_user_id(user.output_dir) == user.id
    except OSError:
        return False


def _is_other(one: object, other: object) -> bool:
    return one is not other


def _local_outputs(user: CacheUser) -> Path:
    """Return the user's output folder, or the working copy of one at an address with its current files.

    Raises:
        StoreError: The address cannot be read, so the needed entries are unknown.
    """
    output_dir = working_copy(user.recipe, user.output_dir, project_root())
    outputs = OutputFolder(user.output_dir, output_dir)
    outputs.fetch("tables/")
    wanted = ("/inputs.parquet", "/finished.json")
    outputs.fetch_listed(
        {name: info for name, info in outputs.infos("runs").items() if name.endswith(wanted)}
    )
    return output_dir


def _keys_in_table(path: Path) -> set[str]:
    table = read_rows(path, {"key", "mask_key", "reference_keys"})
    # `reference_keys` holds several keys, separated by spaces.
    return {key for column in table for text in column.drop_nulls() for key in text.split()}
