"""A file is replaced completely or not at all, also on a full disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.reporting.reports import write_report
from pipeline.storage.atomic import (
    OLD_S,
    TEMP_SUFFIX,
    allow_readers,
    is_temp_name,
    remove_temp_files,
    sync_file,
    sync_folder,
    temp_path_for,
    write_atomically,
    write_bytes,
    write_text,
)
from pipeline.storage.tables import Tables, empty
from tests.pipeline.disk_calls import DiskCalls
from tests.pipeline.namespaces import namespace
from tests.small_disk import on_small_disk


def test_a_file_is_written_with_its_parent_folders(tmp_path: Path) -> None:
    write_text(tmp_path / "a" / "b" / "ü.json", "né")
    assert (tmp_path / "a" / "b" / "ü.json").read_bytes() == "né".encode()


def test_L06_a_failed_write_leaves_the_old_file_and_no_temp_file(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    write_bytes(path, b"old")

    def fail(file: object) -> None:
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        write_atomically(path, fail)
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.parquet"]
    assert path.read_bytes() == b"old"


def test_a_file_being_written_is_visible_only_under_a_temp_name(tmp_path: Path) -> None:
    path = tmp_path / "entry.safetensors"
    names: list[str] = []

    def record_names(file: object) -> None:
        names.extend(entry.name for entry in tmp_path.iterdir())

    write_atomically(path, record_names)
    assert len(names) == 1
    assert names[0].endswith(TEMP_SUFFIX)
    assert is_temp_name(names[0])
    others = ("render.tmp", ".render.tmp", ".12-ab.tmp", f"a{names[0]}")
    assert list(filter(is_temp_name, others)) == []


def test_I18_a_name_at_the_file_systems_limit_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    write_bytes(path, b"x")
    assert path.read_bytes() == b"x"


def test_L14_a_full_disk_names_the_file_and_leaves_tables_and_reports_unchanged(tmp_path: Path) -> None:
    command = [*namespace(), sys.executable, "-m", "tests.pipeline.storage.full_table_disk", str(tmp_path)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr[-3000:]
    observed = json.loads(completed.stdout.splitlines()[-1])
    for error, path in (
        (observed["table"], "tables/rejected/raw_images.parquet"),
        (observed["report"], "reports/raw_images.json"),
    ):
        assert error["what"] == "the disk is full (ENOSPC)"
        assert error["where"] == str(tmp_path / "out" / path)
        assert "free space on that disk" in error["fix"]
    assert observed["same_table"]
    assert observed["same_report"]
    assert observed["files"] == ["raw_images.json", "raw_images.parquet", "rejected.parquet"], (
        "no temporary file"
    )
    assert observed["rows_with_room"] == 3


def test_L06_a_file_is_synced_before_it_gets_its_name(tmp_path: Path, disk_calls: DiskCalls) -> None:
    write_text(tmp_path / "run.json", "{}")
    write_report(tmp_path, "raw_images", {"samples": 0})
    tables = Tables(tmp_path)
    tables.write("raw_images", empty("raw_images"))
    tables.write_rejected("raw_images", empty("rejected"))
    written = ["run.json", "raw_images.json", *["raw_images.parquet"] * 2, "rejected.parquet"]
    assert [name for name in disk_calls.names if not is_temp_name(name)] == written
    assert disk_calls.unsynced == [], "these files would be empty after a power failure"


def test_old_temp_files_of_killed_writers_are_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1_900_000_000
    monkeypatch.setattr("time.time", lambda: now_s)
    old, young = temp_path_for(tmp_path / "tables" / "x"), temp_path_for(tmp_path / "x")
    foreign = tmp_path / ".mine.tmp"
    old.parent.mkdir()
    for path in (old, young, foreign):
        path.write_bytes(b"")
    day_s = 24 * 3600
    for path, age_s in ((old, day_s + 1), (foreign, day_s + 1), (young, day_s)):
        os.utime(path, (now_s - age_s, now_s - age_s))

    remove_temp_files(tmp_path, min_age_s=OLD_S)
    assert not old.exists()
    assert young.exists()
    assert foreign.exists()
    remove_temp_files(tmp_path / "missing")


def test_a_file_and_the_names_in_a_folder_are_synced(tmp_path: Path, disk_calls: DiskCalls) -> None:
    file = tmp_path / "folder" / "file"
    file.parent.mkdir()
    file.write_bytes(b"x")
    assert not disk_calls.is_synced(file)
    sync_file(file)
    assert disk_calls.is_synced(file)
    assert not disk_calls.is_synced(file.parent)
    sync_folder(file.parent)
    assert disk_calls.is_synced(file.parent)


def test_a_file_system_that_refuses_modes_is_no_error() -> None:
    status = Path("/proc/self/status")
    with pytest.raises(PermissionError):
        status.chmod(0o644)
    allow_readers(status)


WRITERS = """
import sys
from pathlib import Path
import polars as pl
from pipeline.storage.atomic import write_atomically
from pipeline.storage.os_errors import as_file_access_error
from pipeline.storage.tables import write_rows

folder, table = Path(sys.argv[1]), pl.DataFrame({"a": [str(n * 7919) for n in range(50_000)]})
writers = {
    "rows": lambda file: write_rows(table, file),
    "parquet": table.write_parquet,
    "ipc": table.write_ipc,
    "csv": table.write_csv,
    "ipc in a path": lambda _: table.write_ipc(folder / "path"),
    "parquet in a path": lambda _: table.lazy().sink_parquet(folder / "path"),
}
for name, write in writers.items():
    try:
        write_atomically(folder / "table", write)
    except BaseException as err:
        error = as_file_access_error(err)
        print(name, "|", None if error is None else f"{error.what} at {error.where}")
    (folder / "path").unlink(missing_ok=True)
"""
"""Writes a table in each way that Polars offers; each one raises another error when the disk is full."""


def test_a_full_disk_is_no_bug_whichever_error_polars_raises(tmp_path: Path) -> None:
    command = on_small_disk(str(tmp_path), "64k", [sys.executable, "-c", WRITERS, str(tmp_path)])
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    errors = dict(line.split(" | ") for line in completed.stdout.splitlines())
    assert len(errors) == 6, completed.stdout
    assert set(errors.values()) == {f"the disk is full (ENOSPC) at {tmp_path / 'table'}"}
