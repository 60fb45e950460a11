"""Tables and reports on a small disk that really fills up. Run in a mount namespace: FOLDER.

What was seen is printed as JSON.
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
    """Rows whose texts do not compress."""
    texts = [os.urandom(200).hex() for _ in range(count)]
    rows = [dict.fromkeys(REJECTED, text) | {"stage": "raw_images"} for text in texts]
    return frame("rejected", rows)


def refused(work: Callable[[], object]) -> dict[str, str]:
    """The error of `work` as a user reads it."""
    with pytest.raises(OSError) as raised:  # noqa: PT011 - its number is looked at below
        work()
    refusal = as_file_access_error(raised.value)
    assert refusal is not None
    return {"what": refusal.what, "where": refusal.where, "fix": refusal.fix}


def main(folder: Path) -> None:
    """A first table and report, more than the disk holds, and room again."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    tables = Tables(folder / "out")
    tables.write_rejected("raw_images", rejected(2))
    write_report(folder / "out", "raw_images", {"samples": 2})
    before, report = tables.read_rejected(), report_path(folder / "out", "raw_images")
    long = {"lines": [os.urandom(50).hex() for _ in range(20_000)]}
    seen: dict[str, Any] = {
        "table": refused(lambda: tables.write_rejected("raw_images", rejected(2_000))),
        "report": refused(lambda: write_report(folder / "out", "raw_images", long)),
        "same_table": tables.read_rejected().equals(before),
        "same_report": json.loads(report.read_text()) == {"samples": 2},
        "files": sorted(path.name for path in folder.rglob("*") if path.is_file()),
    }
    tables.write_rejected("raw_images", rejected(3))
    seen["rows_with_room"] = len(tables.read_rejected())
    sys.stdout.write(json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
