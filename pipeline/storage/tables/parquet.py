"""Read and write the tables of one recipe as Parquet files, each replaced atomically.

output_dir/tables/<asset>.parquet            table of an asset
output_dir/tables/rejected/<stage>.parquet   samples rejected by one stage
output_dir/tables/rejected.parquet           samples rejected by any stage
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import polars as pl

from pipeline.errors import RUN_RECIPE, TableError
from pipeline.log import Log, discard
from pipeline.storage.atomic import write_atomically
from pipeline.storage.tables.schemas import ASSETS, empty, is_valid, row_names, selected, validated

ROWS_AT_ONCE = 8_192
"""Number of rows encoded in memory at a time; about a third of a kilobyte each."""

# Writing takes two thirds of the default level's time, and files are 2% larger.
_COMPRESSION_LEVEL = 1
"""Lowest level of Zstandard."""

_HASH_KEY = "latentline.sha256"
"""Key in a file's metadata: the SHA-256 of the file, in which these digits are zeros."""

_NO_HASH = "0" * 64

# A string in Thrift's compact protocol: its type, its length, its bytes. It is searched, because a damaged
# footer may end the process that parses it.
_STORED_HASH = re.compile(re.escape(_HASH_KEY.encode()) + rb"\x18\x40([0-9a-f]{64})")

_HASHED_AT_ONCE = 2**20

_FOOTER_END_BYTES = 2**16
"""Size of the last part of a footer, which has the metadata."""


class Tables:
    """Tables of one recipe, below `output_dir/tables`."""

    def __init__(self, output_dir: Path, *, log: Log = discard) -> None:
        """Use `output_dir/tables`; the folder is created by the first write.

        `log` receives a line for each damaged file of an earlier run that counts as missing.
        """
        self.folder = output_dir / "tables"
        self._log = log
        self._unused: set[Path] = set()

    def path(self, asset: str) -> Path:
        """Return the path of the table of `asset` (or "rejected")."""
        return self.folder / f"{asset}.parquet"

    def read(self, asset: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """Read and validate a table.

        Args:
            asset: Name of the asset, or "rejected".
            columns: Columns to return, in this order; all by default. Columns of side inputs may be missing.

        Raises:
            TableError: The table is missing, unreadable, or violates its schema.
        """
        path = self.path(asset)
        if not path.is_file():
            raise TableError(
                f"the table of {asset} does not exist",
                where=str(path),
                fix=f"materialize {asset} first: {RUN_RECIPE} <recipe> --cache-only",
            )
        return selected(asset, _read(asset, path, stage=asset, columns=columns), columns)

    def read_previous(self, asset: str, columns: Sequence[str] | None = None) -> pl.DataFrame | None:
        """Read the table of an earlier run; None if there is no valid one."""
        if not self.path(asset).is_file():
            return None
        try:
            return self.read(asset, columns)
        # The stage computes all rows again, so a damaged table or one of an older schema is not an error.
        except TableError as err:
            self.log_unused(err.what, self.path(asset))
            return None

    def log_unused(self, what: str, path: Path) -> None:
        """Log once that a damaged file of an earlier run is not used."""
        if path in self._unused:
            return
        self._unused.add(path)
        what = " ".join(what.split())[:300]
        self._log(f"warning: {what} ({path}); the file counts as missing, and jobs compute its rows again")

    def write(self, asset: str, table: pl.DataFrame) -> Path:
        """Validate the table, sort it by `row_names` and replace the file atomically.

        Returns:
            Path of the file.

        Raises:
            TableError: The table violates the schema; nothing is written.
        """
        path = self.path(asset)

        # Sorted, so that equal rows give equal files, and data versions do not change without a reason.
        rows = validated(asset, table, f"table of {asset} to be written to {path}").sort(row_names(asset))
        write_atomically(path, partial(write_rows, rows))
        return path

    def write_rejected(self, stage: str, rows: pl.DataFrame) -> None:
        """Replace the rows of `stage`, then rebuild `rejected.parquet` from the rows of all stages."""
        # Each stage has its own file, so concurrent runs never undo each other's rows.
        stage_file = self.folder / "rejected" / f"{stage}.parquet"
        checked = validated("rejected", rows, f"samples rejected by {stage}")
        write_atomically(stage_file, partial(write_rows, checked.sort("sample_id")))
        self.merge_rejected()

    def merge_rejected(self) -> None:
        """Rebuild `rejected.parquet` from the files of all stages, without damaged ones.

        A damaged file must not stop a job whose later stage writes it again.
        """
        # Repeated if another stage has replaced its file in the meantime, so that the last one of several
        # concurrent rebuilds includes every row.
        states: list[tuple[int, int]] = []
        while states != (current := self._rejected_states()):
            states = current
            write_atomically(self.path("rejected"), partial(write_rows, self._readable_rejected()))

    def _readable_rejected(self) -> pl.DataFrame:
        parts = [empty("rejected")]
        for stage in ASSETS:
            try:
                parts.append(self.read_rejected(stage))
            except TableError as err:
                self.log_unused(err.what, self.folder / "rejected" / f"{stage}.parquet")
        return pl.concat(parts)

    def read_rejected(self, stage: str | None = None) -> pl.DataFrame:
        """Read the samples rejected by one stage, or by all; no rows if nothing was ever rejected.

        Raises:
            TableError: A stage's file is unreadable or violates the schema.
        """
        parts = [_read("rejected", file, stage=file.stem) for file in self._rejected_files(stage)]
        return pl.concat(parts) if parts else empty("rejected")

    def _rejected_files(self, stage: str | None = None) -> list[Path]:
        stages = ASSETS if stage is None else (stage,)
        files = (self.folder / "rejected" / f"{each}.parquet" for each in stages)
        return [file for file in files if file.is_file()]

    def _rejected_states(self) -> list[tuple[int, int]]:
        stats = [file.stat() for file in self._rejected_files()]
        return [(stat.st_ino, stat.st_mtime_ns) for stat in stats]


def write_rows(table: pl.DataFrame, file: BinaryIO) -> None:
    """Write the table as Parquet, one row group at a time, with its hash.

    `file` is empty and open for reading and writing, such as the one of `write_atomically`.
    """
    table.write_parquet(
        file,
        compression_level=_COMPRESSION_LEVEL,
        row_group_size=ROWS_AT_ONCE,
        metadata={_HASH_KEY: _NO_HASH},
    )
    file.flush()
    stored = _stored_hash(file)
    assert stored is not None, "the metadata are at the end of the file"
    hash_at, _ = stored
    digest = _hash_of(file, hash_at)
    file.seek(hash_at)
    file.write(digest)


def read_rows(
    path: Path, columns: Collection[str] | None = None, *, limit: int | None = None
) -> pl.DataFrame:
    """Read a file of `write_rows`: all columns, or the ones of `columns` that it has; all rows, or the first.

    Raises:
        OSError: The file is missing or cannot be opened.
        polars.exceptions.PolarsError: The file is damaged or not a Parquet file.
    """
    # Polars opens a path several times, and would read a mixture of two tables if another process replaced
    # the file in between.
    with path.open("rb") as file:
        try:
            _require_unchanged(file)
            file.seek(0)
            names = pl.read_parquet_schema(file)
            file.seek(0)
            wanted = None if columns is None else [name for name in names if name in columns]
            return pl.read_parquet(file, columns=wanted, n_rows=limit)
        # Polars panics on some damaged files. A panic is not an Exception, so no caller would catch it.
        except pl.exceptions.PanicException as err:
            raise pl.exceptions.ComputeError(str(err)) from err


def _require_unchanged(file: BinaryIO) -> None:
    """Raise ComputeError if the file differs from what `write_rows` wrote.

    Parquet has no checksums that Polars verifies, and most flipped bits give another text or number. Files of
    0.3.0 and earlier have no hash.
    """
    stored = _stored_hash(file)
    if stored is not None and _hash_of(file, stored[0]) != stored[1]:
        raise pl.exceptions.ComputeError("it changed after it was written")


def _stored_hash(file: BinaryIO) -> tuple[int, bytes] | None:
    """Return the place of the hash in the file and the hash; None if there is none."""
    end_at = max(0, file.seek(0, os.SEEK_END) - _FOOTER_END_BYTES)
    file.seek(end_at)
    # The last one, because a table may contain anything.
    matches = list(_STORED_HASH.finditer(file.read()))
    return (end_at + matches[-1].start(1), matches[-1][1]) if matches else None


def _hash_of(file: BinaryIO, hash_at: int) -> bytes:
    """Return the SHA-256 of the file with `_NO_HASH` at `hash_at`, in hexadecimal."""
    digest = hashlib.sha256()
    file.seek(0)
    _pass_on(file, hash_at, digest.update)
    digest.update(_NO_HASH.encode("ascii"))
    file.seek(hash_at + len(_NO_HASH))
    _pass_on(file, sys.maxsize, digest.update)
    return digest.hexdigest().encode("ascii")


def _pass_on(file: BinaryIO, num_bytes: int, update: Callable[[bytes], object]) -> None:
    while num_bytes > 0 and (part := file.read(min(num_bytes, _HASHED_AT_ONCE))):
        update(part)
        num_bytes -= len(part)


def content_digest(*tables: pl.DataFrame, more: str = "") -> str:
    """Return the SHA-256 of the tables as CSV, in this order, followed by `more`, in hexadecimal."""
    digest = hashlib.sha256()
    for table in tables:
        # In slices, so that only a few thousand rows are text at a time.
        digest.update(table.clear().write_csv().encode("utf-8"))
        for rows in table.iter_slices(ROWS_AT_ONCE):
            digest.update(rows.write_csv(include_header=False).encode("utf-8"))
    digest.update(more.encode("utf-8"))
    return digest.hexdigest()


def _read(asset: str, path: Path, *, stage: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Read and validate a table, or of a valid table only these columns and `row_names`."""
    try:
        if columns is not None:
            table = read_rows(path, {*columns, *row_names(asset)})
            if is_valid(asset, table, pl.read_parquet_schema(path)):
                return table

        # The error names what violates the schema in any column.
        table = read_rows(path)
    except (OSError, pl.exceptions.PolarsError) as err:
        raise TableError(
            f"the table cannot be read: {err}",
            where=str(path),
            fix=f"delete the file and materialize {stage} again",
        ) from err
    return validated(asset, table, str(path))
