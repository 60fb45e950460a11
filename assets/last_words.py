"""What the user sees last: what is wrong, where, and how to fix it, after Dagster's own log and tracebacks.

Dagster prints a failed step's stack and ends with "Run ... resulted in failure". So each problem of a run is
kept, and printed when the process of the `dagster` command ends.
"""

import atexit
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from dagster import Failure

from pipeline.errors import LatentlineError

_kept: dict[str, None] = {}


def keep(text: str) -> None:
    """Print `text` once when this process ends, if it is one of a `dagster` command."""
    if not _kept and _is_dagster_command(sys.argv):
        atexit.register(_print_kept)
    _kept[text] = None


@contextmanager
def failures_stated() -> Generator[None]:
    """Turn a `LatentlineError` into a Dagster `Failure` with its text, which is also kept as last words.

    Raises:
        Failure: It is not retried: the same input fails again.
    """
    try:
        yield
    except LatentlineError as err:
        keep(f"{type(err).__name__}: {err}")
        parts = {"what": err.what, "where": err.where, "fix": err.fix}
        raise Failure(f"{type(err).__name__}: {err}", metadata=parts, allow_retries=False) from err


def _is_dagster_command(argv: list[str]) -> bool:
    return "dagster" in Path(argv[0]).parts[-2:]


def _print_kept() -> None:
    sys.stdout.flush()
    for text in _kept:
        sys.stderr.write(f"\n{text}\n")
    sys.stderr.flush()
