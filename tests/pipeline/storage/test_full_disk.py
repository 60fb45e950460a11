"""Writes of tables and reports to a real disk that is full, in a mount namespace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.pipeline.namespaces import namespace


def test_L14_a_full_disk_names_the_file_and_leaves_tables_and_reports_unchanged(tmp_path: Path) -> None:
    command = [*namespace(), sys.executable, "-m", "tests.pipeline.full_tables", str(tmp_path)]
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
