"""A bomb or a damaged Parquet file ends the process that reads it, and not the job."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from pipeline.errors import DatasetError
from pipeline.raw_images.parquet_process import read_parquet
from pipeline.storage.regular_files import RefusedFileError
from tests.small_disk import on_small_disk


def parquet(table: pl.DataFrame) -> bytes:
    file = io.BytesIO()
    table.write_parquet(file)
    return file.getvalue()


def bomb(num_rows: int = 5_000_000) -> bytes:
    """Return some kilobytes that hold one long caption so many times."""
    return parquet(pl.select(path=pl.repeat("a.png", num_rows), caption=pl.repeat("a rose " * 100, num_rows)))


def test_the_table_is_the_one_that_polars_reads_whether_local_or_in_memory(tmp_path: Path) -> None:
    table = pl.DataFrame(
        {"path": ["a.png", "b.png"], "caption": ["Blüte", None], "tags": [["x", "y"], []], "n": [1, 2]}
    ).with_columns(kind=pl.Series(["p", "q"], dtype=pl.Categorical), day=pl.date(2026, 1, 1))
    (tmp_path / "list.parquet").write_bytes(parquet(table))
    with (tmp_path / "list.parquet").open("rb") as file:
        assert_frame_equal(read_parquet(file), table)
    assert_frame_equal(read_parquet(io.BytesIO(parquet(table))), table)


def test_a_manifest_that_needs_too_much_memory_is_an_error_with_manifest_and_fix(folder: Any) -> None:
    manifest = folder.root / "list.parquet"
    manifest.write_bytes(bomb())
    assert manifest.stat().st_size < 100_000
    folder.dataset = {"path": str(manifest)}
    with pytest.raises(DatasetError, match="more than 1,000,000,000 bytes of memory") as caught:
        folder.scan()
    assert caught.value.where == str(manifest)
    assert "JSON lines" in caught.value.fix


def test_a_file_that_delivers_no_bytes_ends_after_the_time_limit() -> None:
    read_end, write_end = os.pipe()
    message = r"took more than 0\.5 s and was stopped"
    with (
        os.fdopen(write_end, "wb"),
        os.fdopen(read_end, "rb") as silent,
        pytest.raises(RefusedFileError, match=message) as caught,
    ):
        read_parquet(silent, max_wall_s=0.5)
    assert (caught.value.reason, caught.value.fix) == ("too_slow", "write the manifest as JSON lines or CSV")


def test_bytes_on_which_polars_panics_are_reported_as_damaged() -> None:
    data = bytearray(parquet(pl.DataFrame({"path": ["a.png"], "n": [1]})))
    for position in range(80, len(data) - 8):
        damaged = bytes(data[:position]) + b"\xff" * 8 + bytes(data[position + 8 :])
        try:
            read_parquet(io.BytesIO(damaged))
        except pl.exceptions.ComputeError as err:
            if "Panic" in str(err):
                return
    pytest.fail("no damage made Polars panic")


READER = """
import sys
from pathlib import Path
from pipeline.errors import LatentlineError
from pipeline.raw_images.parquet_process import read_parquet

try:
    with Path(sys.argv[1]).open("rb") as file:
        read_parquet(file)
except LatentlineError as err:
    print(type(err).__name__, err.what, err.where)
"""


def test_a_full_temporary_folder_is_not_a_damaged_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, temporary = tmp_path / "list.parquet", tmp_path / "tmp"
    manifest.write_bytes(parquet(pl.DataFrame({"path": [f"{n}.png" for n in range(100_000)]})))
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    command = [sys.executable, "-c", READER, str(manifest)]
    completed = subprocess.run(
        on_small_disk(str(temporary), "64k", command), capture_output=True, text=True, check=True
    )
    assert completed.stdout == f"FileAccessError the disk is full (ENOSPC) {temporary}\n"
