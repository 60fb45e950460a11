"""Functions that receive lines of progress and warnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Log: TypeAlias = Callable[[str], None]
"""Function that accepts one line of progress or a warning, without a trailing newline."""


NOTE = "note: "
"""Start of a line that stays on a terminal, where the next line replaces any other line of progress."""

WARNING = "warning: "
"""Start of a warning, which stays on a terminal too."""


def discard(_line: str) -> None:
    """Ignore a line; the `Log` of callers that report nothing."""
