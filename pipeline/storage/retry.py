"""Requests to a service that may be away for a short time: which errors pass, and how long to wait."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pipeline.escaping import without_secrets

# A gateway or a database node restarts within this time.
RETRY_S = 60.0
"""Seconds for which a request is repeated."""

_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 5.0

_PRECONDITION_FAILED = 412

_UNSUPPORTED_STATUSES = frozenset([400, 405, 501])
"""HTTP statuses with which S3-compatible services answer a condition that they do not know."""

_TRANSIENT_STATUSES = frozenset([408, 429, 500, 502, 503, 504])
"""HTTP statuses of servers that are overloaded, restart or have lost a backend."""

# The libraries of the services must not be imported here, so their errors are recognised by name.
_TRANSIENT_ERRORS = frozenset(
    [
        *("ConnectionError", "TimeoutError"),  # Python, botocore, requests
        *("HTTPClientError", "IncompleteReadError"),  # botocore
        *("ClientConnectionError", "ClientPayloadError"),  # aiohttp
        *("ServiceRequestError", "ServiceResponseError"),  # Azure
        # httpx, with which huggingface_hub sends requests
        *("TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError"),
    ]
)
"""Names of the classes of errors for connections that failed or broke; subclasses count too."""

Answer = TypeVar("Answer")


def retry(send: Callable[[], Answer], *, log: Callable[[str], object] | None = None) -> Answer:
    """Return the answer to a request, which is sent again while the service is unavailable.

    An error that another attempt cannot cure is raised immediately, and any other error after `RETRY_S`.
    `log` receives one line when the first attempt has failed.
    """
    end = time.monotonic() + RETRY_S
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            return send()
        except Exception as err:
            if not is_transient(err) or time.monotonic() + wait_s > end:
                raise
            if log is not None and wait_s == _FIRST_WAIT_S:
                reason = f"{type(err).__name__}: {' '.join(str(err).split())[:200]}"
                log(without_secrets(f"a request failed and is repeated for up to {RETRY_S:g} s: {reason}"))
        # Random, so that processes that failed together do not return together.
        time.sleep(wait_s * random.uniform(0.5, 1))
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def is_transient(err: BaseException) -> bool:
    """Return whether the same request may succeed later."""
    # A host name that cannot be resolved is a wrong address rather than an outage.
    if any(isinstance(each, socket.gaierror) for each in _contexts(err)):
        return False
    return any(
        _http_status(cause) in _TRANSIENT_STATUSES
        or any(parent.__name__ in _TRANSIENT_ERRORS for parent in type(cause).__mro__)
        for cause in _causes(err)
    )


def is_failed_precondition(err: BaseException) -> bool:
    """Return whether a server refused a conditional request because its condition is false."""
    return any(_http_status(cause) == _PRECONDITION_FAILED for cause in _causes(err))


def is_unsupported(err: BaseException) -> bool:
    """Return whether a server may have refused a request because it does not support its condition."""
    return any(_http_status(cause) in _UNSUPPORTED_STATUSES for cause in _causes(err))


def _causes(err: BaseException) -> Iterator[BaseException]:
    # Without contexts, which may be errors that were handled before this one.
    return _chain(err, lambda current: current.__cause__)


def _contexts(err: BaseException) -> Iterator[BaseException]:
    # botocore names no causes.
    return _chain(err, lambda current: current.__cause__ or current.__context__)


def _chain(
    err: BaseException, previous: Callable[[BaseException], BaseException | None]
) -> Iterator[BaseException]:
    # A chain may be circular: fsspec raises errors of its thread again in threads that handle other errors.
    seen = set[int]()
    current: BaseException | None = err
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = previous(current)


def _http_status(err: BaseException) -> int | None:
    """Return the status of the response to which an error of a service's library belongs."""
    response: Any = getattr(err, "response", None)
    if isinstance(response, Mapping):  # botocore
        metadata: Any = response.get("ResponseMetadata", {})
        return metadata.get("HTTPStatusCode")

    # aiohttp, gcsfs and Azure store it in the error, httpx in the response. One after the other, because
    # aiohttp warns of its `code`.
    places = ((err, "status"), (err, "status_code"), (err, "code"), (response, "status_code"))
    statuses = (getattr(place, name, None) for place, name in places)
    return next((status for status in statuses if isinstance(status, int)), None)
