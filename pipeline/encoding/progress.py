"""What an encoding process says while it works: one line for all ranks, and never a long silence."""

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
"""Longest silence."""

_LINE_S = 2.0
"""Least time between two lines; the results of the other ranks are read only for a line."""


class Report(Protocol):
    """Takes the lines; `pipeline.processes.pipes.Reporter` is one."""

    def info(self, text: str) -> None:
        """Say `text` at once."""
        ...

    def progress(self, done: int, total: int, text: str) -> None:
        """Say that `done` of `total` are done."""
        ...


class Progress:
    """Counts the jobs that have ended, of all processes of a launch; only rank 0 speaks.

    Used as a context manager, it also speaks from a thread of its own when nothing has ended for a while.
    """

    def __init__(self, report: Report, folder: Path, *, jobs: Sized, what: str, rank: int) -> None:
        """For `jobs`, whose results come into `folder`; `what` says what they are.

        They are counted when something is said of them, and not before.
        """
        self._report = report
        self._folder = folder
        self._jobs = jobs
        self._what = what
        self._speaks = rank == 0
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
        if self._speaks:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it; say the last number if all went well."""
        self._over.set()
        if self._speaks:
            self._thread.join()
            if error is None:
                self._line()

    def working_on(self, name: str) -> None:
        """What a silence is about to be about."""
        self._current = name

    def ended(self) -> None:
        """A job of this process has ended."""
        if self._speaks and time.monotonic() - self._last_s >= _LINE_S:
            self._line()

    def say(self, text: str) -> None:
        """Something worth a line of its own."""
        if self._speaks:
            with self._lock:
                self._report.info(text)

    def _line(self) -> None:
        with self._lock:
            self._last_s = time.monotonic()
            self._count()
            failed = f", {self._failed} failed" if self._failed else ""
            self._report.progress(self._done, len(self._jobs), f"{self._what}{failed}")

    def _count(self) -> None:
        """Take what each process has added to its results since the last time."""
        for path in self._folder.glob(RESULTS_PATTERN):
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path.name, 0))
                whole_lines = file.read().rpartition(b"\n")[0]
            if whole_lines:
                self._read_bytes[path.name] = self._read_bytes.get(path.name, 0) + len(whole_lines) + 1
            outcomes = [json.loads(line).get("outcome") for line in whole_lines.splitlines()]
            self._done += len(outcomes) - outcomes.count(None)
            self._failed += outcomes.count("failed")

    def _beat(self) -> None:
        while not self._over.wait(1.0):
            silent_s = time.monotonic() - self._last_s
            if silent_s >= HEARTBEAT_S:
                self.say(f"still at work on {self._current}, {silent_s:.0f} s")
                self._last_s = time.monotonic()
