"""The log of a step, which does not fail if Dagster's database does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import lru_cache

from dagster import AssetExecutionContext

from pipeline.escaping import printable_lines, without_secrets

# With PostgreSQL, each failed attempt takes about 20 s.
PAUSE_S = 30.0
"""Time after a failure in which lines are only printed."""


class StepLog:
    """Logs lines without their secrets and control characters.

    A line that cannot be stored is printed to standard error, which Dagster captures.
    """

    def __init__(self, context: AssetExecutionContext) -> None:
        self._context = context
        self._next_attempt_s = 0.0

    def info(self, text: str) -> None:
        """Log a line."""
        self.log("INFO", text)

    def warning(self, text: str) -> None:
        """Log a warning."""
        self.log("WARNING", text)

    def log(self, level: str, text: str) -> None:
        """Log a line with a level such as "INFO"."""
        text = printable_lines(without_secrets(text))
        if time.monotonic() >= self._next_attempt_s:
            try:
                self._context.log.log(level, text)
                return
            except Exception as err:  # each database has its own errors
                self._next_attempt_s = time.monotonic() + PAUSE_S
                reason = printable_lines(f"{type(err).__name__}: {err}".splitlines()[0])
                sys.stderr.write(f"Dagster's log cannot be written ({reason}); lines are printed instead\n")
        sys.stderr.write(f"{level}: {text}\n")
        sys.stderr.flush()


# A process executes one step at a time.
@lru_cache(maxsize=1)
def step_log(context: AssetExecutionContext) -> StepLog:
    """Return the log of the step: one for all of its parts, so that all of them pause after a failure."""
    return StepLog(context)


def run_log(context: AssetExecutionContext) -> Callable[[str], None]:
    """Return a function that logs a line in the log of the step."""
    return step_log(context).info
