"""The problem that a `dagster` command prints last."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from typing import NamedTuple


class Problem(NamedTuple):
    """The three parts of an error message."""

    what: str
    where: str
    fix: str


def last_problem(errors: str) -> Problem:
    """Return the last block of standard error, which must have three parts and no traceback."""
    # After the summary, Dagster reports that the run failed.
    text = re.sub(r"\nError: .* (resulted in failure|failed)\.\n$", "", errors)
    block = text.rstrip("\n").rsplit("\n\n", 1)[-1]
    assert "Traceback" not in block, block
    assert block.count("\n  where: ") == block.count("\n  fix:   ") == 1, errors[-3000:]
    what, location_and_fix = block.split("\n  where: ")
    where, fix = location_and_fix.split("\n  fix:   ")
    assert all(part.strip() for part in (what, where, fix)), block
    return Problem(what, where, fix)


def problem_of(process: subprocess.CompletedProcess[str]) -> Problem:
    """Return the problem of a command, which must have failed with exit status 1 and no standard output."""
    assert process.returncode == 1, (process.returncode, process.stderr[-3000:])
    assert process.stdout == ""
    return last_problem(process.stderr)


Change = Callable[..., object]
"""A change that makes the job of a workspace fail."""
