"""Unpack the shards of datasets with packed images, each once, and again after it has changed.

The folder of an unpacked dataset is in the scratch folder:

    files/<shard>/...       files of a tar archive, or numbered images of a Parquet file and its rows
    shards/<shard>.json     record of a completely unpacked shard: its stat, and the fingerprint of its files
    manifest.parquet        rows of all Parquet shards
    complete.json           names of all shards, written last: without it, some of them may be missing

A shard without a record, or with a record that differs from the shard or its files, is unpacked again. Its
files appear under their name by a rename, and the record after them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import polars as pl
from filelock import FileLock

from pipeline.errors import DatasetError, StoreError, counted
from pipeline.log import NOTE, Log
from pipeline.raw_images.scan_fingerprint import scan_fingerprint
from pipeline.raw_images.shard_list import list_shards
from pipeline.raw_images.unpack_process import ROWS_FILE, unpack_shard
from pipeline.recipe.packed import FILES, MANIFEST, unpacked_folder
from pipeline.reporting.progress import progress
from pipeline.storage.addresses import Address
from pipeline.storage.atomic import is_temp_name, temp_path_for, write_atomically, write_text
from pipeline.storage.hub_revision import at_commit
from pipeline.storage.os_errors import SPARE_BYTES
from pipeline.storage.regular_files import RefusedFileError
from pipeline.storage.remote_source import RemoteSource, source_at, unreadable_error
from pipeline.storage.source import LocalSource, Stat
from pipeline.storage.tables import write_rows

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings, Recipe

_COMPLETE = "complete.json"

UNPACK_VERSION = 1
"""Version of the names and files of an unpacked shard. A new one unpacks all shards again."""


def unpack_shards(recipe: Recipe, *, log: Log, only_new: bool = False) -> None:
    """Unpack the new and changed shards of the recipe's datasets, and remove the files of deleted ones.

    With `only_new`, datasets of which all shards were unpacked on this machine before are not compared with
    their shards.

    Raises:
        DatasetError: Shards cannot be listed or read, or one of them must not be unpacked.
        StoreError: The disk has too little space.
    """
    for settings in recipe.datasets:
        if settings.name in recipe.packed and not (only_new and _is_complete(unpacked_folder(settings))):
            limit = recipe.checks.max_file_bytes
            _Unpacker(settings, recipe.packed[settings.name], limit, log).run()


class _Unpacker:
    def __init__(self, settings: DatasetSettings, packed: Address, max_file_bytes: int, log: Log) -> None:
        self._packed = packed
        self._source = _source_of(packed, max_file_bytes)
        self._folder = unpacked_folder(settings)
        self._files, self._records = self._folder / FILES, self._folder / "shards"
        self._name, self._log = settings.name, log
        self._columns = _image_columns(settings)
        self._done_bytes = 0

    def run(self) -> None:
        shards = list_shards(self._source, self._packed)
        self._files.mkdir(parents=True, exist_ok=True)

        # One process unpacks a dataset, and recipes with the same shards share it.
        with FileLock(self._folder / "lock", fallback_to_soft=False):
            self._remove_unfinished()
            self._remove_deleted(shards)
            missing = {name: stat for name, stat in shards.items() if not self._is_unpacked(name, stat)}
            if missing:
                self._forget_complete()
                self._unpack(missing)
            if self._columns and not (self._folder / MANIFEST).is_file():
                self._write_manifest(list(shards))
            if not _is_complete(self._folder):
                content = {"version": UNPACK_VERSION, "shards": [_stem(name) for name in shards]}
                write_text(self._folder / _COMPLETE, json.dumps(content))

    def _unpack(self, shards: Mapping[str, Stat]) -> None:
        num_bytes = sum(stat[0] for stat in shards.values())
        self._require_space(shards, num_bytes)
        size = f"{counted(len(shards), 'shard')} of {num_bytes / 1e9:,.2f} GB"
        free = f"{shutil.disk_usage(self._folder).free / 1e9:,.1f} GB free"
        self._log(f"{NOTE}unpacking {size} of {self._name} to {self._folder} ({free})")

        with progress(
            lambda: self._done_bytes // 10**6,
            num_bytes // 10**6,
            f"{self._name} unpacked",
            log=self._log,
            measure="MB",
        ):
            self._done_bytes = end = 0
            for name, stat in shards.items():
                self._unpack_one(name, stat)
                end += stat[0]
                self._done_bytes = end

    def _unpack_one(self, name: str, stat: Stat) -> None:
        record, target = self._record(name), self._files / _stem(name)
        temp = temp_path_for(target)
        temp.mkdir()
        try:
            with self._opened(name, stat) as file:
                limit = self._source.max_file_bytes
                unpack_shard(file, temp, columns=self._columns, max_file_bytes=limit)
        except RefusedFileError as err:
            what = f"a shard of dataset {self._name} is not unpacked: {err.detail}"
            raise DatasetError(what, where=self._source.where(name), fix=err.fix) from err
        except OSError as err:
            what = f"a shard of dataset {self._name} cannot be read: {err}"
            fix = "check that the file is readable and start the job again; unpacked shards are kept"
            raise DatasetError(what, where=self._source.where(name), fix=fix) from err

        # After a crash of the machine, a record must not name files that never reached the disk.
        os.sync()
        record.unlink(missing_ok=True)
        if target.exists():
            shutil.rmtree(target)
        temp.rename(target)
        content = {**self._identity(stat), "fingerprint": scan_fingerprint([target])}
        write_text(record, json.dumps(content))

    @contextmanager
    def _opened(self, name: str, stat: Stat) -> Generator[BinaryIO]:
        if not isinstance(self._source, RemoteSource):
            with self._source.open(name) as file:
                yield file
            return

        # The process that unpacks has no access to the network.
        with tempfile.TemporaryFile(dir=self._folder) as file:
            for part in self._source.read_parts(name, stat[0]):
                file.write(part)
                self._done_bytes += len(part) // 2  # the rest of the work is to unpack it
            if not _is_same(self._source.stats([name]).tolist()[0], stat):
                raise OSError("it changed while it was downloaded")
            file.flush()
            file.seek(0)
            yield file

    def _require_space(self, shards: Mapping[str, Stat], num_bytes: int) -> None:
        largest = max(stat[0] for stat in shards.values()) if isinstance(self._source, RemoteSource) else 0
        needed, free = num_bytes + largest + SPARE_BYTES, shutil.disk_usage(self._folder).free
        if free < needed:
            raise StoreError(
                f"the disk must have about {needed:,} bytes free for the images of dataset {self._name}, got "
                f"{free:,}",
                where=str(self._folder),
                fix="free some space there, or set scratch in the deployment file to another disk",
            )

    def _is_unpacked(self, name: str, stat: Stat) -> bool:
        try:
            record = json.loads(self._record(name).read_text(encoding="utf-8"))
            fingerprint = record.pop("fingerprint")
            return record == self._identity(stat) and fingerprint == scan_fingerprint(
                [self._files / _stem(name)]
            )
        except (OSError, ValueError, AttributeError, KeyError, DatasetError):
            return False

    def _identity(self, stat: Stat) -> dict[str, Any]:
        return {"version": UNPACK_VERSION, "columns": self._columns, "stat": list(stat)}

    def _record(self, name: str) -> Path:
        return self._records / f"{_stem(name)}.json"

    def _remove_unfinished(self) -> None:
        # Only the holder of the lock writes.
        for path in self._files.iterdir():
            if is_temp_name(path.name):
                shutil.rmtree(path)

    def _remove_deleted(self, shards: Mapping[str, Stat]) -> None:
        stems = {_stem(name) for name in shards}
        for path in self._files.iterdir():
            if path.name not in stems:
                self._forget_complete()
                (self._records / f"{path.name}.json").unlink(missing_ok=True)
                shutil.rmtree(path)

    def _forget_complete(self) -> None:
        for name in (_COMPLETE, MANIFEST):
            (self._folder / name).unlink(missing_ok=True)

    def _write_manifest(self, names: Sequence[str]) -> None:
        tables: list[pl.DataFrame] = []
        for stem in map(_stem, names):
            rows = pl.read_parquet(self._files / stem / ROWS_FILE)
            paths = [pl.format("{}/{}", pl.lit(stem), pl.col(name)).alias(name) for name in self._columns]
            tables.append(rows.with_columns(paths))
        try:
            table = pl.concat(tables, how="diagonal_relaxed")
        except pl.exceptions.PolarsError as err:
            what = f"the shards of dataset {self._name} have columns of different types: {err}"
            fix = "set datasets[].path to shards of one type"
            raise DatasetError(what, where=str(self._packed), fix=fix) from err
        write_atomically(self._folder / MANIFEST, partial(write_rows, table))


def _is_complete(folder: Path) -> bool:
    """Return whether each shard has a record and its files; the shards, which may be remote, are not read."""
    try:
        content = json.loads((folder / _COMPLETE).read_text(encoding="utf-8"))
        return content["version"] == UNPACK_VERSION and all(
            (folder / "shards" / f"{stem}.json").is_file() and (folder / FILES / stem).is_dir()
            for stem in content["shards"]
        )
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _source_of(packed: Address, max_file_bytes: int) -> LocalSource | RemoteSource:
    try:
        folder = at_commit(packed.parent)
    except Exception as err:
        raise unreadable_error(packed, err) from err
    return source_at(folder, max_file_bytes=max_file_bytes)


def _image_columns(settings: DatasetSettings) -> list[str]:
    """Return the image columns of Parquet shards, the dataset's own first; none for tar archives."""
    if not settings.is_manifest:
        return []
    columns = (each.settings.column for each in settings.side_inputs)
    return list(dict.fromkeys([settings.path_column, *(each for each in columns if each is not None)]))


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def _is_same(stat: Sequence[int], listed: Stat) -> bool:
    columns = RemoteSource.compared_columns
    return [stat[column] for column in columns] == [listed[column] for column in columns]
