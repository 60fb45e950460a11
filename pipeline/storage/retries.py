"""Repetition of requests to a service that does not answer for a short time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from pipeline.escaping import without_secrets
from pipeline.storage.os_errors import is_disk_full

RETRY_S = 60.0
"""Time after its first failure during which a request is repeated."""

MAX_PAUSE_S = 8.0
"""Maximum pause between two attempts; the first pause is 0.5 s, and each one is twice the one before."""

Result = TypeVar("Result")


def retried(request: Callable[[], Result], *, log: Callable[[str], object], what: str) -> Result:
    """Return the result of `request`, which is repeated for `RETRY_S` if it raises an `OSError`.

    Missing files, missing permissions and a full local disk are not repeated. `log` receives one line about
    `what` when the first attempt fails.

    Raises:
        OSError: The last attempt failed.
    """
    first_failure_s: float | None = None
    pause_s = 0.5
    while True:
        try:
            return request()
        except (FileNotFoundError, PermissionError):
            raise
        except OSError as err:
            now_s = time.monotonic()
            if first_failure_s is None:
                first_failure_s = now_s
                log(without_secrets(f"{what} failed and is repeated for {RETRY_S:g} s: {err}"))
            if is_disk_full(err) or now_s - first_failure_s >= RETRY_S:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
