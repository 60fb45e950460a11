"""The errors of a step that become Dagster failures with what, where and fix."""

from __future__ import annotations

import errno

import pytest
from dagster import Failure

from pipeline.errors import StoreError
from resources.failures import errors_as_failures, failure_text


def test_a_latentline_error_becomes_a_failure_that_is_not_retried() -> None:
    with pytest.raises(Failure) as raised, errors_as_failures():
        raise StoreError("the entry is truncated", where="cache/ab.safetensors", fix="run the cache job")
    assert raised.value.allow_retries is False
    assert raised.value.description is not None
    assert raised.value.description == (
        "StoreError: the entry is truncated\n  fix:   run the cache job\n  where: cache/ab.safetensors"
    )
    assert list(raised.value.metadata) == ["fix", "what", "where"]


def test_the_fix_of_a_long_message_is_among_the_first_lines() -> None:
    """The event list of Dagster's UI shows about four lines of a message."""
    rows = "\n".join(f"photos/{number}.jpg" for number in range(30))
    with pytest.raises(Failure) as raised, errors_as_failures():
        raise StoreError("30 images have no caption", where=rows, fix="write the captions")
    assert "write the captions" in str(raised.value.description).splitlines()[1]
    text = failure_text(str(raised.value.description), raised.value.metadata)
    assert text is not None
    assert text.startswith("StoreError: 30 images have no caption\n  where: photos/0.jpg\n")
    assert text.endswith("\n  fix:   write the captions")


def test_a_failure_of_other_code_has_no_parts() -> None:
    assert failure_text("something", {}) is None


def test_an_error_of_the_operating_system_becomes_a_failure_that_names_the_path() -> None:
    with pytest.raises(Failure) as raised, errors_as_failures():
        raise OSError(errno.ENOSPC, "No space left on device", "/mnt/small/tables/x.parquet")
    assert raised.value.metadata["what"].value == "the disk is full (ENOSPC)"
    assert raised.value.metadata["where"].value == "/mnt/small/tables/x.parquet"


def test_any_other_error_is_a_bug_and_keeps_its_type() -> None:
    with pytest.raises(ZeroDivisionError), errors_as_failures():
        raise ZeroDivisionError
