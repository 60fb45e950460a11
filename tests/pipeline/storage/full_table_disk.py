"""Write tables and reports to a small tmpfs until it is full. Run in a mount namespace.

Usage: `python -m tests.pipeline.storage.full_table_disk FOLDER`. The observations are printed as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.reporting.reports import report_path, write_report
from pipeline.storage.os_errors import as_file_access_error
from pipeline.storage.tables import REJECTED, Tables, frame


def rejected(count: int) -> pl.DataFrame:
    """Return `count` rejected rows with random texts, which do not compress."""
    texts = [os.urandom(200).hex() for _ in range(count)]
    rows = [dict.fromkeys(REJECTED, text) | {"stage": "raw_images"} for text in texts]
    return frame("rejected", rows)


def error_of(work: Callable[[], object]) -> dict[str, str]:
    """Return the error that `work` raises, as a user reads it."""
    with pytest.raises(OSError) as raised:  # noqa: PT011 - as_file_access_error checks its errno
        work()
    error = as_file_access_error(raised.value)
    assert error is not None
    return {"what": error.what, "where": error.where, "fix": error.fix}


def main(folder: Path) -> None:
    """Write small files, then files larger than the disk, then small files again."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    tables = Tables(folder / "out")
    tables.write_rejected("raw_images", rejected(2))
    write_report(folder / "out", "raw_images", {"samples": 2})
    before, report = tables.read_rejected(), report_path(folder / "out", "raw_images")
    large_report = {"lines": [os.urandom(50).hex() for _ in range(20_000)]}
    observed: dict[str, Any] = {
        "table": error_of(lambda: tables.write_rejected("raw_images", rejected(2_000))),
        "report": error_of(lambda: write_report(folder / "out", "raw_images", large_report)),
        "same_table": tables.read_rejected().equals(before),
        "same_report": json.loads(report.read_text()) == {"samples": 2},
        "files": sorted(path.name for path in folder.rglob("*") if path.is_file()),
    }
    tables.write_rejected("raw_images", rejected(3))
    observed["rows_with_room"] = len(tables.read_rejected())
    sys.stdout.write(json.dumps(observed) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
