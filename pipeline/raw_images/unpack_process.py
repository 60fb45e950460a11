"""Unpack one shard in a separate process with bounded memory, time and space.

A shard can come from a stranger. Nothing of it decides a path outside of the new folder: rows of Parquet are
numbered, and members of tar archives other than plain files with plain names are refused.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

import polars as pl

from pipeline.images.formats import sniff
from pipeline.processes.limited_process import (
    Limits,
    TooSlowError,
    apply_limits,
    last_error_line,
    run_limited,
)
from pipeline.raw_images.parquet_process import MAX_EXPANSION, MIN_TABLE_BYTES, THREADS
from pipeline.storage.os_errors import SPARE_BYTES, as_file_access_error, os_error_number
from pipeline.storage.regular_files import RefusedFileError

MAX_FILES = 1_000_000
"""Maximum number of files in a shard."""

ROWS_FILE = "rows.parquet"
"""File with the rows of a Parquet shard, in which paths replace the images."""

_BATCH_ROWS = 100
"""Number of rows in memory at a time; the Hub writes row groups of this size for images."""

_COPIED_BYTES = 2**20

_TAR_END = 1024
"""Number of zero bytes at the end of a tar archive."""

_BYTES_PER_CPU_S = 2_000_000
"""Slowest expected speed, from which the limit of processor time follows."""

_SUFFIXES = {"JPEG": "jpg", "JPEG2000": "jp2"}
"""Suffixes of formats that differ from the format's name."""


class _RefusedError(Exception):
    """A shard that is not unpacked; the text is the reason."""


def unpack_shard(file: BinaryIO, folder: Path, *, columns: list[str], max_file_bytes: int) -> None:
    """Unpack an opened shard into an empty folder.

    Args:
        file: A tar archive, or a Parquet file. It has a descriptor.
        folder: Existing folder for the files; for Parquet also for `ROWS_FILE`.
        columns: Image columns of Parquet, the dataset's images first; none for a tar archive.
        max_file_bytes: Size above which one file in the shard is refused.

    Raises:
        RefusedFileError: The shard is damaged, or it must not be unpacked.
        FileAccessError: The folder cannot be written, or its disk is full.
    """
    num_bytes = os.fstat(file.fileno()).st_size

    # Images are compressed already, so a shard that expands is not one of images.
    max_bytes = max(MIN_TABLE_BYTES, MAX_EXPANSION * num_bytes)
    arguments = {
        "folder": str(folder),
        "columns": columns,
        "max_file_bytes": max_file_bytes,
        "max_bytes": max_bytes,
    }
    max_cpu_s = 120 + num_bytes // _BYTES_PER_CPU_S
    limits = Limits(max_cpu_s, 600.0 + 10 * max_cpu_s, max_bytes)
    try:
        process = run_limited(__name__, arguments, file, limits, variables={"POLARS_MAX_THREADS": THREADS})
    except TooSlowError as err:
        fix = "write smaller shards, or read them from a faster disk"
        raise RefusedFileError(
            "too_slow", f"unpacking took more than {err} and was stopped", fix=fix
        ) from err
    if process.returncode != 0:
        raise _failure(process, folder)


def _failure(process: subprocess.CompletedProcess[bytes], folder: Path) -> Exception:
    line = last_error_line(process)
    reason, _, detail = line.partition(": ")
    if reason == _RefusedError.__name__:
        return RefusedFileError("refused_shard", detail, fix="write the shard again, or use another dataset")
    if process.returncode < 0 or reason == MemoryError.__name__:
        fix = "write smaller shards, or smaller row groups"
        return RefusedFileError("too_much_memory", "unpacking needs too much memory", fix=fix)
    number = _disk_error(line)
    if number is not None:
        error = OSError(number, os.strerror(number), str(folder))
        return as_file_access_error(error) or error
    detail = f"it cannot be unpacked: {reason}: {detail}"
    return RefusedFileError("damaged_shard", detail, fix="copy or download it again, or remove it")


def _disk_error(line: str) -> int | None:
    """Return the number of an error that is the disk's and not the shard's; None for any other."""
    match = re.search(r"\[Errno (\d+)\]", line)
    number = int(match[1]) if match else os_error_number(OSError(line))
    return number if number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO) else None


class _Space:
    """Counts the files and bytes that are written, and refuses more than a shard may have."""

    def __init__(self, folder: Path, max_bytes: int, max_file_bytes: int) -> None:
        self._bytes_left, self._files_left = max_bytes, MAX_FILES
        self._max_file_bytes = max_file_bytes
        self._folder, self._unchecked_bytes = folder, 0

    def take(self, name: str, num_bytes: int) -> None:
        if num_bytes > self._max_file_bytes:
            limit = f"must have at most {self._max_file_bytes:,} bytes, got {num_bytes:,}"
            raise _RefusedError(f"{name} {limit}; set checks.max_file_bytes if you trust it")
        self._bytes_left -= num_bytes
        self._files_left -= 1
        if self._bytes_left < 0:
            raise _RefusedError("its files are much larger than the shard itself")
        if self._files_left < 0:
            raise _RefusedError(f"it must have at most {MAX_FILES:,} files")

        # The size of a Parquet file does not show how large its images are.
        self._unchecked_bytes += num_bytes
        if self._unchecked_bytes >= SPARE_BYTES // 2:
            self._unchecked_bytes = 0
            if shutil.disk_usage(self._folder).free < SPARE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))


def _unpack_tar(file: IO[bytes], folder: Path, space: _Space) -> None:
    # Archives end in two empty blocks. Without this check, tarfile would take an archive that was cut between
    # two members for a complete one.
    num_bytes = os.fstat(file.fileno()).st_size
    if os.pread(file.fileno(), _TAR_END, max(0, num_bytes - _TAR_END)).strip(b"\0"):
        raise _RefusedError("it does not end as a tar archive does, as after an interrupted copy")

    with tarfile.open(fileobj=file, mode="r|") as archive:
        for member in archive:
            name = repr(member.name)
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                raise _RefusedError(f"{name} is a link, a device or another special file")
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise _RefusedError(f"{name} leads out of the archive")

            space.take(name, member.size)
            content = archive.extractfile(member)
            assert content is not None
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with target.open("xb") as new:
                    _copy(content, new)
            except FileExistsError:
                raise _RefusedError(f"{name} is in the archive twice") from None


def _copy(content: IO[bytes], new: IO[bytes]) -> None:
    while part := content.read(_COPIED_BYTES):
        new.write(part)


def _unpack_parquet(folder: Path, columns: list[str], space: _Space) -> None:
    # By its path, because reading all of it at once would need the memory of all images.
    shard = pl.scan_parquet("/dev/fd/0")
    schema = shard.collect_schema()
    for column in columns:
        if column not in schema:
            existing = ", ".join(map(repr, schema.names()))
            raise _RefusedError(f"it has no column {column!r}; its columns are {existing}")
        if not _has_bytes(schema[column]):
            raise _RefusedError(f"the column {column!r} must hold images, got {schema[column]}")

    # Columns of bytes that the recipe does not name would take memory and are of no use in a manifest.
    used = [name for name, kind in schema.items() if name in columns or not _has_bytes(kind)]
    row, parts = 0, list[pl.DataFrame]()
    for batch in shard.select(used).collect_batches(chunk_size=_BATCH_ROWS, maintain_order=True):
        paths = [
            pl.Series(column, list(_write_images(batch[column], folder, row, index, space)), pl.String)
            for index, column in enumerate(columns)
        ]
        parts.append(batch.with_columns(paths))
        row += batch.height
    table = pl.concat(parts) if parts else _without_rows(schema, used, columns)
    table.write_parquet(folder / ROWS_FILE)


def _without_rows(schema: pl.Schema, used: list[str], columns: list[str]) -> pl.DataFrame:
    return pl.DataFrame(schema={name: pl.String if name in columns else schema[name] for name in used})


def _has_bytes(kind: Any) -> bool:
    if isinstance(kind, pl.Struct):
        return any(field.name == "bytes" and field.dtype == pl.Binary for field in kind.fields)
    return kind == pl.Binary


def _write_images(
    images: pl.Series, folder: Path, first_row: int, index: int, space: _Space
) -> Iterator[str | None]:
    """Write the images of one column, and yield their paths; the first column has a path for each row."""
    contents = images.struct.field("bytes") if isinstance(images.dtype, pl.Struct) else images
    for row, content in enumerate(contents, start=first_row):
        if content is None and index:
            yield None
            continue

        # A row without an image becomes an empty file, which the scan rejects with its name.
        data: bytes = content or b""
        kind = sniff(data[:64]) or "bin"
        suffix = _SUFFIXES.get(kind, kind.lower())
        name = f"{row:08}.{suffix}" if index == 0 else f"{row:08}-{index}.{suffix}"
        space.take(f"row {row} of {images.name!r}", len(data))
        (folder / name).write_bytes(data)
        yield name


def main() -> None:
    """Unpack the standard input as the arguments describe."""
    arguments = apply_limits()
    folder, columns = Path(arguments["folder"]), arguments["columns"]
    space = _Space(folder, arguments["max_bytes"], arguments["max_file_bytes"])
    try:
        if columns:
            _unpack_parquet(folder, columns, space)
        else:
            _unpack_tar(sys.stdin.buffer, folder, space)
    except BaseException as err:  # Polars' panics do not derive from Exception
        name = type(err).__name__
        sys.exit(f"{name}: {' '.join(str(err).split())}")


if __name__ == "__main__":
    main()
