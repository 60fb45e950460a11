"""Errors of a step as Dagster failures, which show what, where and fix as separate metadata."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from dagster import (
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    Failure,
    MetadataValue,
    RetryRequested,
)

from pipeline.errors import GateClosedError, LatentlineError
from pipeline.log import WARNING, Log, discard
from pipeline.storage.os_errors import as_file_access_error
from pipeline.storage.retry import is_transient

_PARTS = ("what", "where", "fix")

# The requests themselves are repeated for a minute before they fail (pipeline/storage/retry.py).
RETRY_DELAYS_S = (30, 120)
"""Seconds before a step is tried again after an error that passes by itself, for each further attempt."""


@contextmanager
def errors_as_failures(retry_number: int | None = None, *, log: Log = discard) -> Generator[None]:
    """Turn a `LatentlineError`, or an `OSError` of the operating system, into a Dagster `Failure`.

    With the number of earlier attempts of the step, an outage of a service or of a network becomes a
    `RetryRequested`, unless this was the last attempt. `log` receives a line for it.
    """
    try:
        yield
    except LatentlineError as err:
        if retry_number is not None and retry_number < len(RETRY_DELAYS_S) and is_transient(err):
            delay_s = RETRY_DELAYS_S[retry_number]
            log(f"{WARNING}{err.what}; tried again in {delay_s} s ({err.where})")
            raise RetryRequested(max_retries=len(RETRY_DELAYS_S), seconds_to_wait=delay_s) from err
        # The three parts explain the error. Dagster would print a cause as well, with its traceback.
        raise _failure(err) from None
    except Exception as err:
        access_error = as_file_access_error(err)
        if access_error is None:
            raise
        raise _failure(access_error) from err


def _failure(err: LatentlineError) -> Failure:
    parts = {"fix": err.fix, "what": err.what, "where": err.where}
    description = f"{type(err).__name__}: {err.text_with_fix_first()}"

    # Outages in a step's own work are repeated above. Another retry with the same input would fail again.
    return Failure(description, metadata=parts, allow_retries=False)


def has_closed_gate(instance: DagsterInstance, run_id: str) -> bool:
    """Return whether a gate has stopped the run."""
    failures = instance.all_logs(run_id, of_type=DagsterEventType.STEP_FAILURE)
    return any(_kind(entry.get_dagster_event()) == GateClosedError.__name__ for entry in failures)


def _kind(event: DagsterEvent) -> str | None:
    failure = event.step_failure_data.user_failure_data
    return (failure.description or "").partition(":")[0] if failure is not None else None


def failure_text(description: str, metadata: Mapping[str, MetadataValue[Any]]) -> str | None:
    """Return type, what, where and fix of a `Failure` of `errors_as_failures`; None for any other."""
    values = {name: str(metadata[name].value) for name in _PARTS if name in metadata}
    if set(values) != set(_PARTS):
        return None
    kind = description.partition(":")[0]
    return f"{kind}: {LatentlineError(values['what'], where=values['where'], fix=values['fix'])}"
