"""One process at a time trains a run; a lock ends with the process that holds it, however that ends."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.5


@contextmanager
def only_one(path: Path, log: Callable[[str], None]) -> Generator[None]:
    """Hold the lock file `path` for the body; waits for another process that holds it, and says so once.

    The kernel frees it when the process ends, killed or not (FAILURES O08). The file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        said = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not said:
                    log(f"another process trains this run; waiting for it ({path})")
                said = True
                time.sleep(_POLL_S)
        yield
