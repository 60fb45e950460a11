"""How far a long piece of work is: a bar on a terminal, lines in the log otherwise.

A thread of its own looks now and then at a number that the work counts anyway: that costs its loop nothing,
and it speaks also while one item holds all others up.
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
"""Work that is over by then says nothing."""

LONGEST_SILENCE_S = 60.0
"""A line comes after a tenth of the time passed, at least `FIRST_LINE_S` and at most this after the last."""

BAR_AFTER_S = 0.5
"""A bar that were gone at once would only flicker."""


@contextmanager
def progress(done: Callable[[], int], total: int | None, doing: str, *, log: Log) -> Generator[None]:
    """Tell how far the work in the body is until it ends.

    Args:
        done: How much is done by now; called in another thread.
        total: Of how much; None where it is not known.
        doing: What is counted, such as "images decoded".
        log: Gets the lines, from another thread, where there is no terminal.
    """
    over = threading.Event()
    bar = terminal.open_progress_bar()

    def draw(bar: terminal.ProgressBar) -> None:
        wait_s = BAR_AFTER_S
        while not over.wait(wait_s):
            bar.show(done(), total, doing)
            wait_s = terminal.REDRAW_S

    def write() -> None:
        start_s = time.monotonic()
        wait_s = FIRST_LINE_S
        while not over.wait(wait_s):
            passed_s = time.monotonic() - start_s
            log(line(done(), total, doing, passed_s))
            wait_s = min(max(FIRST_LINE_S, passed_s / 10), LONGEST_SILENCE_S)

    look = write if bar is None else partial(draw, bar)
    thread = threading.Thread(target=look, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if bar is not None:
            bar.close()


def line(done: int, total: int | None, doing: str, passed_s: float) -> str:
    """What the log says of work that has taken `passed_s` seconds: how much, how fast, how long still."""
    speed = done / passed_s
    said = f"{doing}: {done:,}" + ("" if total is None else f" of {total:,}")
    rate = f"{speed:,.0f} a second" if speed >= 10 else f"{speed:.2g} a second"
    left = "" if total is None or not done else f", about {_duration((total - done) / speed)} left"
    return f"{said} ({rate}{left})"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
