"""The errors of a step that become Dagster failures with what, where and fix."""

from __future__ import annotations

import errno

import pytest
from dagster import Failure

from pipeline.errors import StoreError
from resources.failures import errors_as_failures


def test_a_latentline_error_becomes_a_failure_that_is_not_retried() -> None:
    with pytest.raises(Failure) as raised, errors_as_failures():
        raise StoreError("the entry is truncated", where="cache/ab.safetensors", fix="run the cache job")
    assert raised.value.allow_retries is False
    assert raised.value.description is not None
    assert raised.value.description.startswith("StoreError: the entry is truncated\n  where: cache/ab")
    assert set(raised.value.metadata) == {"what", "where", "fix"}


def test_an_error_of_the_operating_system_becomes_a_failure_that_names_the_path() -> None:
    with pytest.raises(Failure) as raised, errors_as_failures():
        raise OSError(errno.ENOSPC, "No space left on device", "/mnt/small/tables/x.parquet")
    assert raised.value.metadata["what"].value == "the disk is full (ENOSPC)"
    assert raised.value.metadata["where"].value == "/mnt/small/tables/x.parquet"


def test_any_other_error_is_a_bug_and_keeps_its_type() -> None:
    with pytest.raises(ZeroDivisionError), errors_as_failures():
        raise ZeroDivisionError
