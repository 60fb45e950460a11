"""The terminal that someone watches a job on, if there is one, and a progress bar on it.

Dagster points standard error at a file while a step runs, and launched processes write into a file of ours.
So which terminal it was is found out before that, and handed down by its name.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

TERMINAL_VARIABLE = "LATENTLINE_TERMINAL"
"""Names the terminal's device file to this process, and to those that it launches."""

REDRAW_S = 0.2
"""Least time between two states of a bar."""

_UNKNOWN_SIZE = (80, 24)
"""Columns and lines where the terminal does not say both."""

_WATCHED_COMMANDS = (["job", "execute"], ["asset", "materialize"])
"""Of `dagster`. Its UI and its daemon run jobs too, on the terminal that they were started on: they have a
page for what those say, and several at once would write over each other."""


def find_terminal(arguments: list[str]) -> None:
    """Note the terminal of standard error where the command in `arguments` is one that someone watches.

    It is none when standard error is redirected, when the process is in the background, or when the terminal
    cannot go back on a line.

    Args:
        arguments: As `sys.argv`.
    """
    os.environ.pop(TERMINAL_VARIABLE, None)
    if arguments[1:3] not in _WATCHED_COMMANDS or os.environ.get("TERM", "dumb") == "dumb":
        return
    with suppress(OSError):
        if os.isatty(2) and os.tcgetpgrp(2) == os.getpgrp():
            os.environ[TERMINAL_VARIABLE] = os.ttyname(2)


def bar() -> Bar | None:
    """A new progress bar; None where there is no terminal."""
    name = os.environ.get(TERMINAL_VARIABLE)
    if not name:
        return None
    try:
        # Not to become the controlling terminal of a launched process, which has none.
        file = os.fdopen(os.open(name, os.O_WRONLY | os.O_NOCTTY), "w", encoding="utf-8", errors="replace")
    except OSError:
        return None
    return Bar(file)


class Bar:
    """One line at the bottom of a terminal, gone when it is closed."""

    def __init__(self, file: TextIO) -> None:
        """Nothing is drawn yet; `file` is closed with the bar."""
        self._file = file
        self._drawn_s = float("-inf")
        self._tqdm: tqdm[NoReturn] | None = None

    def show(self, done: int, total: int | None, text: str) -> None:
        """Draw that `done` are done, unless it was drawn just now.

        Args:
            done: How many are done.
            total: Of how many; None where it is not known.
            text: Of what, and what is worth knowing about them.
        """
        now_s = time.monotonic()
        if now_s - self._drawn_s < REDRAW_S:
            return
        self._drawn_s = now_s
        drawn = self._tqdm = self._tqdm or self._begun(done, total, text)
        drawn.n = done
        drawn.total = total
        drawn.set_description_str(text, refresh=False)
        with suppress(OSError):  # the terminal was closed: the job goes on
            drawn.refresh()

    def close(self) -> None:
        """Clear the line."""
        with suppress(OSError):
            if self._tqdm is not None:
                self._tqdm.close()
            self._file.close()

    def _begun(self, done: int, total: int | None, text: str) -> tqdm[NoReturn]:
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no thread of its own: it is redrawn from here
        size = self._size()
        columns, lines = size or _UNKNOWN_SIZE
        return tqdm(
            total=total,
            initial=done,
            desc=text,
            file=self._file,
            leave=False,
            dynamic_ncols=size is not None,
            ncols=columns,
            nrows=lines,
        )

    def _size(self) -> tuple[int, int] | None:
        """Columns and lines; None where either is not known, as on terminals that programs make."""
        try:
            columns, lines = os.get_terminal_size(self._file.fileno())
        except OSError:
            return None
        return (columns, lines) if columns and lines else None
