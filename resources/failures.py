"""Errors of a step as Dagster failures, which show what, where and fix as separate metadata."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dagster import (
    DagsterEvent,
    DagsterEventType,
    DagsterInstance,
    Failure,
    MetadataValue,
    RetryRequested,
)

from pipeline.errors import GateClosedError, LatentlineError, PathIsolationError
from pipeline.log import WARNING, Log, discard
from pipeline.storage.os_errors import as_file_access_error
from pipeline.storage.retry import is_transient
from resources.run_events import run_entries

_PARTS = ("what", "where", "fix")

# The gate path_isolation has an error of its own, because nothing may be written after it.
_CLOSED_GATES = {GateClosedError.__name__, PathIsolationError.__name__}

RECIPE_PLACEHOLDER = "<recipe>"
"""Stands for the recipe's name in errors of code that all recipes share."""

MAX_RETRIES = 2

# The requests themselves are repeated for a minute before they fail (pipeline/storage/retry.py).
RETRY_DELAY_S = 90
"""Seconds before a step is tried again after an error that passes by itself."""


@dataclass(frozen=True)
class Problem:
    """What happened, where, and how to fix it."""

    what: str
    where: str
    fix: str

    def __str__(self) -> str:
        """Return three aligned paragraphs."""
        where, fix = (part.replace("\n", "\n         ") for part in (self.where, self.fix))
        return f"{self.what}\n  where: {where}\n  fix:   {fix}"


@contextmanager
def errors_as_failures(
    *, recipe: str = RECIPE_PLACEHOLDER, retries: bool = False, log: Log = discard
) -> Generator[None]:
    """Turn a `LatentlineError`, or an `OSError` of the operating system, into a Dagster `Failure`.

    `recipe` replaces the placeholder in commands. With `retries`, an outage of a service or of a network
    becomes a `RetryRequested`. `log` receives a line for it.
    """
    try:
        yield
    except LatentlineError as err:
        if retries and is_transient(err):
            log(f"{WARNING}{err.what}; a step is tried {MAX_RETRIES + 1} times in all ({err.where})")
            # After the last attempt, Dagster reports the cause.
            raise RetryRequested(MAX_RETRIES, seconds_to_wait=RETRY_DELAY_S) from _failure(err, recipe)
        # The three parts explain the error. Dagster would print a cause as well, with its traceback.
        raise _failure(err, recipe) from None
    except Exception as err:
        access_error = as_file_access_error(err)
        if access_error is None:
            raise
        raise _failure(access_error, recipe) from err


def _failure(err: LatentlineError, recipe: str) -> Failure:
    parts = {"fix": err.fix, "what": err.what, "where": err.where}
    parts = {name: text.replace(RECIPE_PLACEHOLDER, recipe) for name, text in parts.items()}
    description = f"{type(err).__name__}: {err.text_with_fix_first()}".replace(RECIPE_PLACEHOLDER, recipe)

    # Outages are repeated above. Another retry with the same input would fail again.
    return Failure(description, metadata=parts, allow_retries=False)


def has_closed_gate(instance: DagsterInstance, run_id: str) -> bool:
    """Return whether a gate has stopped the run."""
    failures = run_entries(instance, run_id, DagsterEventType.STEP_FAILURE)
    return any(_kind(entry.get_dagster_event()) in _CLOSED_GATES for entry in failures)


def _kind(event: DagsterEvent) -> str | None:
    failure = event.step_failure_data.user_failure_data
    return (failure.description or "").partition(":")[0] if failure is not None else None


def failure_problem(description: str, metadata: Mapping[str, MetadataValue[Any]]) -> Problem | None:
    """Return the problem in a `Failure` of `errors_as_failures`; None for any other."""
    values = {name: str(metadata[name].value) for name in _PARTS if name in metadata}
    if set(values) != set(_PARTS):
        return None
    kind = description.partition(":")[0]
    return Problem(f"{kind}: {values['what']}", values["where"], values["fix"])
