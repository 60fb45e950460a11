"""The last words of a `dagster` command."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import NamedTuple


class Words(NamedTuple):
    """What, where and fix, as a person reads them last."""

    what: str
    where: str
    fix: str


def last_words(errors: str) -> Words:
    """The last block of standard error, which must be the three parts and no traceback."""
    block = errors.rstrip("\n").rsplit("\n\n", 1)[-1]
    assert "Traceback" not in block, block
    assert block.count("\n  where: ") == block.count("\n  fix:   ") == 1, errors[-3000:]
    what, rest = block.split("\n  where: ")
    where, fix = rest.split("\n  fix:   ")
    assert all(part.strip() for part in (what, where, fix)), block
    return Words(what, where, fix)


def refused(done: subprocess.CompletedProcess[str]) -> Words:
    """The last words of a command that must have failed, and not by a signal."""
    assert done.returncode == 1, (done.returncode, done.stderr[-3000:])
    assert done.stdout == ""
    return last_words(done.stderr)


Change = Callable[..., object]
"""Makes a workspace one that is refused."""
