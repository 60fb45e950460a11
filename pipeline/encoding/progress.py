"""Progress of the encoding processes: one line for all ranks, and a heartbeat during slow jobs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sized
from pathlib import Path
from types import TracebackType
from typing import Protocol

from pipeline.encoding.jobs import RESULTS_PATTERN

HEARTBEAT_S = 5.0
"""Maximum time without a line."""

_LINE_S = 2.0
"""Minimum time between two lines; the results of other ranks are read once per line."""


class Report(Protocol):
    """Receiver of progress lines, such as `pipeline.processes.pipes.Reporter`."""

    def info(self, text: str) -> None:
        """Report a line of text."""
        ...

    def progress(self, done: int, total: int, text: str) -> None:
        """Report that `done` of `total` jobs have ended."""
        ...


class Progress:
    """Counts the finished jobs of all ranks; only rank 0 reports.

    As a context manager, it also starts a thread that reports the current job if none ends for a while.
    """

    def __init__(self, report: Report, folder: Path, *, jobs: Sized, what: str, rank: int) -> None:
        """Report on the results in `folder`.

        Args:
            report: Receiver of the lines.
            folder: Folder of the results files.
            jobs: Jobs of all ranks; they are counted when a line is reported, and not before.
            what: Description of the jobs for the line.
            rank: Rank of this process.
        """
        self._report = report
        self._folder = folder
        self._jobs = jobs
        self._what = what
        self._reports = rank == 0
        self._read_bytes: dict[str, int] = {}
        self._done = 0
        self._failed = 0
        self._lock = threading.Lock()
        self._last_s = time.monotonic()
        self._current = "loading the model"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Progress:
        """Start the heartbeat."""
        if self._reports:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the heartbeat, and report the final count unless there was an error."""
        self._over.set()
        if self._reports:
            self._thread.join()
            if error is None:
                self._line()

    def working_on(self, name: str) -> None:
        """Set the current job, which the heartbeat names."""
        self._current = name

    def ended(self) -> None:
        """Report progress after a job of this process, at most every two seconds."""
        if self._reports and time.monotonic() - self._last_s >= _LINE_S:
            self._line()

    def say(self, text: str) -> None:
        """Report a line of text."""
        if self._reports:
            with self._lock:
                self._report.info(text)

    def _line(self) -> None:
        with self._lock:
            self._last_s = time.monotonic()
            self._count()
            failed = f", {self._failed} failed" if self._failed else ""
            self._report.progress(self._done, len(self._jobs), f"{self._what}{failed}")

    def _count(self) -> None:
        """Count the results that each rank has appended since the last call."""
        for path in self._folder.glob(RESULTS_PATTERN):
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path.name, 0))
                complete_lines = file.read().rpartition(b"\n")[0]
            if complete_lines:
                self._read_bytes[path.name] = self._read_bytes.get(path.name, 0) + len(complete_lines) + 1
            outcomes = [json.loads(line).get("outcome") for line in complete_lines.splitlines()]
            self._done += len(outcomes) - outcomes.count(None)
            self._failed += outcomes.count("failed")

    def _beat(self) -> None:
        while not self._over.wait(1.0):
            idle_s = time.monotonic() - self._last_s
            if idle_s >= HEARTBEAT_S:
                self.say(f"still working on {self._current}, {idle_s:.0f} s")
                self._last_s = time.monotonic()
