"""Results of studies in demo/results, a line per unit of work, so that a study can be stopped at any time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Result = dict[str, Any]
"""JSON object of a line."""


def read_results(file: Path) -> list[Result]:
    """Return the stored results by seed; none without a file."""
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    return sorted(map(json.loads, lines), key=lambda each: each["seed"])


def add_result(file: Path, result: Result) -> None:
    """Append a line."""
    file.parent.mkdir(exist_ok=True)
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(result, separators=(",", ":")) + "\n")
