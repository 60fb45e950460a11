"""Progress of long work: a bar on a terminal, or lines in the log at most every 30 s.

Examples of lines:

    loading the transformer (3/7): 0:05 elapsed, 2.1 GiB of memory
    training: step 120 of 1,000, 2.3 steps/s, 0:52 elapsed, about 6:23 left, 7.9 GiB of GPU memory
    images decoded: 1,200 of 5,000, 200/s, 0:06 elapsed, about 0:19 left, 0.4 GiB of memory
    model weights hashed: 1,200 of 5,134 MB, 400 MB/s, 0:03 elapsed, about 0:10 left, 0.4 GiB of memory
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from pipeline.background import in_background
from pipeline.log import Log
from pipeline.reporting import terminal

FIRST_LINE_S = 5.0
"""Shortest time between any two lines, and before the first line; shorter work writes none."""

MIN_ACTIVITY_FRACTION = 0.4
"""Fraction of `FIRST_LINE_S` that an activity takes at least before its first line, which spares the log the
short ones among several."""

LINE_INTERVAL_S = 30.0
"""Shortest time between two lines about the same activity."""

TICK_S = 0.5
"""Time between two checks whether a line is due, in seconds."""

BAR_AFTER_S = 0.5
"""Time before a bar appears, so that short work does not flicker."""

_GIB = 2**30


@dataclass
class _Activity:
    """Work in progress. A phase, which cannot be counted, has no `done`."""

    text: str
    start_s: float
    unit: str = ""
    measure: str = ""
    note: str = ""
    done: int | None = None
    first_done: int = 0
    total: int | None = None
    has_line: bool = False
    has_last_line: bool = False


class ProgressLines:
    """Writes the progress of one process to a log or a bar; all methods may be called from any thread.

    Attributes:
        memory: Returns the memory in use as text, such as "7.9 GiB of GPU memory".
    """

    def __init__(
        self,
        log: Log,
        *,
        bar: terminal.ProgressBar | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without an activity; `log` receives the lines if there is no bar."""
        self.memory: Callable[[], str] = memory_text
        self._log = log
        self._bar = bar
        self._clock = clock
        self._lock = threading.Lock()
        self._activity: _Activity | None = None
        self._counted: dict[str, _Activity] = {}
        self._last_line_s = clock()

    def phase(self, text: str) -> None:
        """Set the current activity to one that cannot be counted, such as "loading the transformer (3/7)"."""
        with self._lock:
            self._activity = _Activity(text, self._clock())

    def count(
        self,
        done: int,
        total: int | None,
        text: str,
        *,
        unit: str = "",
        measure: str = "",
        note: str = "",
    ) -> None:
        """Set the current activity to counted work; its speed is measured from the first call with this text.

        Args:
            done: Number of items done.
            total: Number of all items; None if unknown.
            text: Description of the items, such as "images decoded".
            unit: Singular of the items if `text` does not name them, such as "step".
            measure: Unit of work that is measured instead of counted, such as "MB".
            note: State of the work, such as the current loss.
        """
        with self._lock:
            activity = self._counted.get(text)
            if activity is None:
                activity = self._counted[text] = _Activity(text, self._clock(), first_done=done)
            activity.done, activity.total, activity.note = done, total, note
            activity.unit, activity.measure = unit, measure
            self._activity = activity

    def tick(self) -> None:
        """Redraw the bar, or write a line if one is due."""
        with self._lock:
            activity = self._activity
            if activity is None:
                return
            if self._bar is not None:
                text = f"{activity.text}, {activity.measure}" if activity.measure else activity.text
                self._bar.show(activity.done, activity.total, text, activity.note)
                return
            now_s = self._clock()
            interval_s = LINE_INTERVAL_S if activity.has_line else FIRST_LINE_S
            lasts = now_s - activity.start_s >= MIN_ACTIVITY_FRACTION * FIRST_LINE_S
            if lasts and now_s - self._last_line_s >= interval_s:
                self._write(activity)

    def finish(self, *, always: bool = False) -> None:
        """Write the last line of counted work once, if it took at least `FIRST_LINE_S` or if `always`."""
        with self._lock:
            activity = self._activity
            if activity is None or activity.done is None or activity.has_last_line:
                return
            if always or self._clock() - activity.start_s >= FIRST_LINE_S:
                activity.has_last_line = True
                self._write(activity)

    @contextmanager
    def in_background(self, update: Callable[[], object] | None = None) -> Generator[None]:
        """Call `tick` in a thread until the body ends, each time after `update` if there is one."""

        def report(ended: threading.Event) -> None:
            wait_s = TICK_S if self._bar is None else BAR_AFTER_S
            while not ended.wait(wait_s):
                if update is not None:
                    update()
                self.tick()
                wait_s = TICK_S if self._bar is None else terminal.REDRAW_S

        # In a thread, the work pays nothing for the lines, and they appear even while one item blocks all
        # others.
        with in_background(report, name="progress"):
            yield

    def _write(self, activity: _Activity) -> None:
        activity.has_line = True
        self._last_line_s = self._clock()
        self._log(_line(activity, self._last_line_s - activity.start_s, self.memory()))


@contextmanager
def progress(
    done: Callable[[], int],
    total: int | Callable[[], int | None] | None,
    doing: str,
    *,
    log: Log,
    measure: str = "",
) -> Generator[None]:
    """Report the progress of the work in the body until it ends; see `ProgressLines.count`.

    Args:
        done: Returns the number of items done; called from another thread.
        total: Number of all items, None if unknown, or a function that returns it.
        doing: Description of the items, such as "images decoded".
        log: Receives the lines, from another thread, if there is no terminal.
        measure: Unit of work that is measured instead of counted, such as "MB".
    """
    bar = terminal.open_progress_bar()
    lines = ProgressLines(log, bar=bar)

    def update() -> None:
        lines.count(done(), total() if callable(total) else total, doing, measure=measure)

    update()
    try:
        with lines.in_background(update):
            yield
        if bar is None:
            update()
            lines.finish()
    finally:
        if bar is not None:
            bar.close()


@contextmanager
def phase(text: str, *, log: Log) -> Generator[None]:
    """Report the elapsed time of work that cannot be counted, such as "listing the cache", until it ends."""
    bar = terminal.open_progress_bar()
    lines = ProgressLines(log, bar=bar)
    lines.phase(text)
    try:
        with lines.in_background():
            yield
    finally:
        if bar is not None:
            bar.close()


def memory_text() -> str:
    """Return the resident memory of this process, such as "0.4 GiB of memory"."""
    return f"{psutil.Process().memory_info().rss / _GIB:.1f} GiB of memory"


def _line(activity: _Activity, elapsed_s: float, memory: str) -> str:
    # Each line can be understood alone: readers of a log or of Dagster's UI meet it among other lines.
    elapsed = f"{duration_text(elapsed_s)} elapsed"
    if activity.done is None:
        return f"{activity.text}: {elapsed}, {memory}"

    unit = f"{activity.unit} " if activity.unit else ""
    total = "" if activity.total is None else f" of {activity.total:,}"
    measure = f" {activity.measure}" if activity.measure else ""
    parts = [f"{activity.text}: {unit}{activity.done:,}{total}{measure}"]

    # A resumed training starts to count at its checkpoint.
    per_second = (activity.done - activity.first_done) / elapsed_s if elapsed_s > 0 else 0.0
    if per_second > 0:
        parts.append(_speed(per_second, activity.unit, activity.measure))
    parts.append(elapsed)
    if per_second > 0 and activity.total is not None and activity.done < activity.total:
        parts.append(f"about {duration_text((activity.total - activity.done) / per_second)} left")
    parts.append(memory)
    return ", ".join([*parts, activity.note] if activity.note else parts)


def _speed(per_second: float, unit: str, measure: str = "") -> str:
    # "200/s", "2.3 steps/s" or "0.4 MB/s", and for slow work "14 s per step".
    number = f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.1f}"
    if measure:
        return f"{number} {measure}/s"
    if per_second < 0.5:
        return f"{1 / per_second:,.0f} s per {unit or 'item'}"
    return f"{number} {unit}s/s" if unit else f"{number}/s"


def duration_text(seconds: float) -> str:
    """Return a duration as minutes and seconds, such as "6:23", or with hours, such as "1:02:03"."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"
