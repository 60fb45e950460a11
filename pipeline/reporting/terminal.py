"""The terminal on which a person watches a job, and the progress bar drawn on it."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, TextIO

from pipeline.escaping import printable

if TYPE_CHECKING:
    from tqdm import tqdm

TERMINAL_VARIABLE = "LATENTLINE_TERMINAL"
"""Environment variable with the device name of the terminal, inherited by launched processes."""

REDRAW_S = 0.2
"""Shortest time between two redraws of a bar, in seconds."""

_CLEAR_LINE = "\r\x1b[K"

_DEFAULT_SIZE = (80, 24)
"""Columns and lines assumed for a terminal that does not report both."""


def find_terminal() -> None:
    """Set `TERMINAL_VARIABLE` if this process runs in the foreground of a terminal, and remove it otherwise.

    `TERM=dumb`, or no `TERM`, turns bars off.
    """
    # Dagster redirects standard error to a file while a step runs, and launched processes write to a log
    # file. So the terminal is found when definitions load, and the variable passes on its device name.
    os.environ.pop(TERMINAL_VARIABLE, None)
    if os.environ.get("TERM", "dumb") == "dumb":
        return

    # Standard input must be the terminal too. Runs started by Dagster's UI and daemon are multiprocessing
    # children, for which Python replaces `sys.stdin`: they report progress to their log, even when the UI
    # itself was started on a terminal.
    with suppress(OSError, ValueError):  # a closed stream raises ValueError
        has_input = sys.stdin is not None and sys.stdin.isatty()
        if has_input and os.isatty(2) and os.tcgetpgrp(2) == os.getpgrp():
            os.environ[TERMINAL_VARIABLE] = os.ttyname(2)


def open_progress_bar() -> ProgressBar | None:
    """Return a new progress bar, or None if the command was not started in a terminal."""
    name = os.environ.get(TERMINAL_VARIABLE)
    if not name:
        return None
    try:
        # Without O_NOCTTY the device would become the controlling terminal of a launched process.
        file = os.fdopen(os.open(name, os.O_WRONLY | os.O_NOCTTY), "w", encoding="utf-8", errors="replace")
    except OSError:
        return None
    return ProgressBar(file)


class ProgressBar:
    """A tqdm bar on one line of a terminal, cleared when it is closed."""

    def __init__(self, file: TextIO) -> None:
        """Create a bar on `file`, which `close` closes; the first `show` draws it."""
        self._file = file
        self._drawn_s = float("-inf")
        self._text = ""
        self._tqdm: tqdm[NoReturn] | None = None

    def show(self, done: int | None, total: int | None, text: str, note: str = "") -> None:
        """Draw the current state, at most once per `REDRAW_S`.

        Args:
            done: Number of items done; None for a phase that cannot be counted, which shows only its time.
            total: Number of all items; None if unknown.
            text: Description of the items. Each description has a bar with its own time and speed.
            note: State of the work, such as the current loss.
        """
        now_s = time.monotonic()
        if now_s - self._drawn_s < REDRAW_S:
            return
        self._drawn_s = now_s

        # The note may name the current image or caption, whose escape sequences a terminal would obey.
        text, note = printable(text), printable(note)
        with suppress(OSError):  # a closed terminal must not stop the job
            if self._tqdm is None or text != self._text:
                self._clear()
                self._tqdm, self._text = self._start(done, total, text), text
            self._tqdm.n = done or 0
            self._tqdm.total = total
            self._tqdm.set_postfix_str(note, refresh=False)
            # Another process may have written a status line to the same line since, longer than the bar.
            self._file.write(_CLEAR_LINE)
            self._tqdm.refresh()

    def close(self) -> None:
        """Clear the line and close the file."""
        with suppress(OSError):
            self._clear()
            self._file.close()

    def _clear(self) -> None:
        if self._tqdm is not None:
            self._tqdm.close()

    def _start(self, done: int | None, total: int | None, text: str) -> tqdm[NoReturn]:
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # `show` redraws the bar, so tqdm's monitor thread is not needed
        size = self._terminal_size()
        columns, lines = size or _DEFAULT_SIZE
        return tqdm(
            total=total,
            initial=done or 0,
            desc=text,
            bar_format="{desc}: {elapsed}" if done is None else None,
            file=self._file,
            leave=False,
            dynamic_ncols=size is not None,
            ncols=columns,
            nrows=lines,
        )

    def _terminal_size(self) -> tuple[int, int] | None:
        try:
            columns, lines = os.get_terminal_size(self._file.fileno())
        except OSError:
            return None
        # A pseudo-terminal may report 0.
        return (columns, lines) if columns and lines else None
