"""Errors of a step as Dagster failures, which show what, where and fix as separate metadata."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from dagster import Failure

from pipeline.errors import LatentlineError
from pipeline.storage.os_errors import as_file_access_error


@contextmanager
def errors_as_failures() -> Generator[None]:
    """Turn a `LatentlineError`, or an `OSError` of the operating system, into a Dagster `Failure`.

    Raises:
        Failure: With `what`, `where` and `fix` as metadata, and without retries: the same input fails again.
    """
    try:
        yield
    except LatentlineError as err:
        raise _failure(err) from err
    except Exception as err:
        access_error = as_file_access_error(err)
        if access_error is None:
            raise
        raise _failure(access_error) from err


def _failure(err: LatentlineError) -> Failure:
    parts = {"what": err.what, "where": err.where, "fix": err.fix}
    return Failure(f"{type(err).__name__}: {err}", metadata=parts, allow_retries=False)
