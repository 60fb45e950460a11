"""Writing a line of numbers for each optimizer step as a run goes; `pipeline.runs` reads them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType

from pipeline.runs import Metrics


class MetricsLog:
    """Appends to a metrics file; use it as a context."""

    def __init__(self, path: Path) -> None:
        """Open for appending; a line that an earlier process left torn is ended first."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        if self._file.tell() > 0:
            with path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"
            if torn:
                self._file.write(b"\n")

    def append(self, metrics: Metrics) -> None:
        """Add a line; a reader sees it at once."""
        self._file.write(json.dumps(metrics).encode("utf-8") + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Bring all lines to the disk; called with each checkpoint, so that no resumed run lacks any."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> MetricsLog:
        """This log."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()
