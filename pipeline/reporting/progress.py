"""Progress of long work: a bar on a terminal, or lines in the log.

A separate thread reads a counter that the work maintains anyway. The work's loop pays nothing for it, and
progress is reported even while a single item blocks all others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

from pipeline.reporting import terminal
from pipeline.reporting.reports import Log

FIRST_LINE_S = 5.0
"""Time before the first line, in seconds; shorter work writes none."""

MAX_INTERVAL_S = 60.0
"""Longest time between two lines. The interval is a tenth of the elapsed time, at least `FIRST_LINE_S`."""

BAR_AFTER_S = 0.5
"""Time before a bar appears, so that short work does not flicker."""


@contextmanager
def progress(done: Callable[[], int], total: int | None, doing: str, *, log: Log) -> Generator[None]:
    """Report the progress of the work in the body until it ends.

    Args:
        done: Returns the number of items done; called from another thread.
        total: Number of all items; None if unknown.
        doing: Description of the items, such as "images decoded".
        log: Receives the lines, from another thread, if there is no terminal.
    """
    finished = threading.Event()
    bar = terminal.open_progress_bar()

    def draw(bar: terminal.ProgressBar) -> None:
        wait_s = BAR_AFTER_S
        while not finished.wait(wait_s):
            bar.show(done(), total, doing)
            wait_s = terminal.REDRAW_S

    def write() -> None:
        start_s = time.monotonic()
        wait_s = FIRST_LINE_S
        while not finished.wait(wait_s):
            elapsed_s = time.monotonic() - start_s
            log(line(done(), total, doing, elapsed_s))
            wait_s = min(max(FIRST_LINE_S, elapsed_s / 10), MAX_INTERVAL_S)

    report = write if bar is None else partial(draw, bar)
    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
        if bar is not None:
            bar.close()


def line(done: int, total: int | None, doing: str, elapsed_s: float) -> str:
    """Return a log line with the items done, the rate and the remaining time."""
    per_second = done / elapsed_s
    count = f"{doing}: {done:,}" + ("" if total is None else f" of {total:,}")
    rate = f"{per_second:,.0f} per second" if per_second >= 10 else f"{per_second:.2g} per second"
    remaining = "" if total is None or not done else f", about {_duration((total - done) / per_second)} left"
    return f"{count} ({rate}{remaining})"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
