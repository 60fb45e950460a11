"""A process that seals, records keys or collects garbage in forks, which kill themselves before a change.

It reads lines "<action> <address> <number>" and answers each with the fork's exit status.
The libraries are imported once. Polars starts its threads when it is first used, which is in a fork.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipeline.cache import sealing
from pipeline.cache.store import Store
from pipeline.cache.used_keys import KeyLists
from pipeline.log import discard
from pipeline.maintenance.gc import delete, survey
from pipeline.storage.addresses import address
from pipeline.storage.remote_folder import RemoteFolder
from tests.pipeline.packs_case import spec_of

NUM_ENTRIES = 5
USED = sorted(range(NUM_ENTRIES), key=lambda number: spec_of(number).key)[3:]
"""Numbers of the entries that "gc of all ages" keeps; the others are in another pack."""

ENTRIES_PER_PACK = 3
ROOT = Path(__file__).resolve().parents[2]

_CHANGES = [(os, name) for name in ("fsync", "replace", "rename", "link", "unlink", "mkdir")]
_CHANGES += [(RemoteFolder, name) for name in ("put", "remove")]


def kill_before(number: int) -> None:
    """Let this process kill itself before its change of this number, counted from 1."""
    count = 0

    def killing(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)  # the signal may arrive a moment later
            return function(*arguments, **options)

        return call

    for owner, name in _CHANGES:
        setattr(owner, name, killing(getattr(owner, name)))


def act(action: str, cache: str) -> None:
    """Seal the entries in packs of three, record the keys of all, or delete what is not used."""
    where = address(cache)
    if action == "seal":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sealing, "MAX_ENTRIES", ENTRIES_PER_PACK)
            sealing.seal(Store(where), map(spec_of, range(NUM_ENTRIES)), log=discard)
    elif action == "use":
        KeyLists(where, [[spec_of(number).key for number in range(NUM_ENTRIES)]], log=discard).mark()
    elif action == "gc of all ages":
        used = [pl.Series([spec_of(number).key for number in USED])]
        delete(where, survey(where, keep_s=-60.0, recipe_keys=used))
    else:
        delete(where, survey(where))


class Killer:
    """Connection to such a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Use a process that was started with `killer`."""
        self._process = process

    def run(self, action: str, cache: str, number: int) -> bool:
        """Act on a cache, and return whether the fork was killed before this change."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{action}\t{cache}\t{number}\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        assert status in (0, -signal.SIGKILL)
        return status != 0


@contextmanager
def killer() -> Generator[Killer]:
    """Run such a process during the body."""
    command = [sys.executable, "-m", "tests.pipeline.pack_killer"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ.copy()
    )
    try:
        yield Killer(process)
    finally:
        process.communicate(timeout=60)


def main() -> None:
    """Serve until the end of the input."""
    for line in sys.stdin:
        action, cache, number = line.rstrip("\n").split("\t")
        if (child := os.fork()) == 0:
            status = 1
            try:
                kill_before(int(number))
                act(action, cache)
                status = 0
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
