"""Writes of tables and reports to a real disk that is full, in a mount namespace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.pipeline.namespaces import namespace


def test_L14_a_full_disk_names_the_file_and_leaves_tables_and_reports_unchanged(tmp_path: Path) -> None:
    command = [*namespace(), sys.executable, "-m", "tests.pipeline.full_tables", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    seen = json.loads(ran.stdout.splitlines()[-1])
    for refusal, path in (
        (seen["table"], "tables/rejected/raw_images.parquet"),
        (seen["report"], "reports/raw_images.json"),
    ):
        assert refusal["what"] == "the disk is full (ENOSPC)"
        assert refusal["where"] == str(tmp_path / "out" / path)
        assert "free space on that disk" in refusal["fix"]
    assert seen["same_table"]
    assert seen["same_report"]
    assert seen["files"] == ["raw_images.json", "raw_images.parquet", "rejected.parquet"], "no temporary file"
    assert seen["rows_with_room"] == 3
