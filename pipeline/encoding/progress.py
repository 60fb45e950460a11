"""Progress of the encoding processes: one count for all ranks, with the current job while none ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sized
from pathlib import Path
from types import TracebackType
from typing import Protocol

from pipeline.encoding.jobs import RESULTS_PATTERN

SLOW_JOB_S = 5.0
"""Time without a finished job after which progress names the current one."""

_COUNT_INTERVAL_S = 2.0
"""Shortest time between two counts, which read the results of all ranks."""


class Report(Protocol):
    """Receiver of progress lines, such as `pipeline.processes.pipes.Reporter`."""

    def info(self, text: str) -> None:
        """Report a line of text."""
        ...

    def phase(self, text: str) -> None:
        """Report work that cannot be counted, such as "loading the VAE"."""
        ...

    def progress(self, done: int, total: int, text: str, *, note: str = "") -> None:
        """Report that `done` of `total` jobs have ended."""
        ...


class Progress:
    """Counts the finished jobs of all ranks; only rank 0 reports.

    As a context manager, it also starts a thread that names the current job if none ends for a while.
    """

    def __init__(self, report: Report, folder: Path, *, jobs: Sized, what: str, rank: int) -> None:
        """Report on the results in `folder`; `what` describes the jobs for the line.

        The jobs of all ranks are counted when a line is reported, and not before.
        """
        self._report = report
        self._folder = folder
        self._jobs = jobs
        self._what = what
        self._reports = rank == 0
        self._read_bytes: dict[str, int] = {}
        self._done = 0
        self._failed = 0
        # The heartbeat and the encoder both report.
        self._lock = threading.Lock()
        self._counted_s = self._ended_s = time.monotonic()
        self._current: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Progress:
        if self._reports:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._reports:
            self._thread.join()
            if error is None:
                self._current = None
                self._count_and_report()

    def phase(self, text: str) -> None:
        """Report what happens before the first job or after the last one, such as "loading the VAE"."""
        self._current = None
        if self._reports:
            self._report.phase(text)

    def working_on(self, name: str) -> None:
        """Set the current job, which is named if it is slow."""
        is_first, self._current = self._current is None, name
        if is_first and self._reports:
            self._ended_s = time.monotonic()
            self._count_and_report()  # speed is measured from the first job

    def ended(self) -> None:
        """Report progress after a job of this process, at most every two seconds."""
        self._ended_s = time.monotonic()
        if self._reports and self._ended_s - self._counted_s >= _COUNT_INTERVAL_S:
            self._count_and_report()

    def say(self, text: str) -> None:
        """Report a line of text."""
        if self._reports:
            with self._lock:
                self._report.info(text)

    def _count_and_report(self) -> None:
        with self._lock:
            self._counted_s = time.monotonic()
            self._count()
            notes = [f"{self._failed} failed"] if self._failed else []
            if self._current is not None and self._counted_s - self._ended_s >= SLOW_JOB_S:
                notes.append(f"working on {self._current} for {self._counted_s - self._ended_s:.0f} s")
            self._report.progress(self._done, len(self._jobs), self._what, note=", ".join(notes))

    def _count(self) -> None:
        for path in self._folder.glob(RESULTS_PATTERN):
            with path.open("rb") as file:
                # Only the lines since the last count: a rank writes one for each of its entries.
                file.seek(self._read_bytes.get(path.name, 0))
                # A rank may be writing its last line at this moment.
                complete_lines = file.read().rpartition(b"\n")[0]
            if complete_lines:
                self._read_bytes[path.name] = self._read_bytes.get(path.name, 0) + len(complete_lines) + 1
            outcomes = [json.loads(line).get("outcome") for line in complete_lines.splitlines()]
            self._done += len(outcomes) - outcomes.count(None)
            self._failed += outcomes.count("failed")

    def _beat(self) -> None:
        while not self._over.wait(1.0):
            if self._current is not None and time.monotonic() - self._ended_s >= SLOW_JOB_S:
                self._count_and_report()
