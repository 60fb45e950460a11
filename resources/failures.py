"""A step that fails says what, where and how to fix it, as Dagster's `Failure`, which keeps them apart."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from dagster import Failure

from pipeline.errors import LatentlineError
from pipeline.storage.os_errors import as_file_access_error


@contextmanager
def failures_stated() -> Generator[None]:
    """Turn a `LatentlineError`, and an `OSError` that the system gave, into a Dagster `Failure`.

    Raises:
        Failure: With `what`, `where` and `fix` as metadata. It is not retried: the same input fails again.
    """
    try:
        yield
    except LatentlineError as err:
        raise _failure(err) from err
    except Exception as err:
        refusal = as_file_access_error(err)
        if refusal is None:
            raise
        raise _failure(refusal) from err


def _failure(err: LatentlineError) -> Failure:
    parts = {"what": err.what, "where": err.where, "fix": err.fix}
    return Failure(f"{type(err).__name__}: {err}", metadata=parts, allow_retries=False)
