"""The errors of a step that become Dagster failures with what, where and fix."""

import errno

import pytest
from dagster import (
    AssetExecutionContext,
    DagsterInstance,
    Failure,
    RetryRequested,
    asset,
    materialize,
)

from pipeline.errors import StoreError
from resources import failures
from resources.failures import errors_as_failures, failure_problem


def test_a_latentline_error_becomes_a_failure_that_is_not_retried() -> None:
    with pytest.raises(Failure) as raised, errors_as_failures():
        raise StoreError("the entry is truncated", where="cache/ab.safetensors", fix="run the cache job")
    assert raised.value.allow_retries is False
    assert raised.value.description is not None
    assert raised.value.description == (
        "StoreError: the entry is truncated\n  fix:   run the cache job\n  where: cache/ab.safetensors"
    )
    assert list(raised.value.metadata) == ["fix", "what", "where"]


def outage() -> StoreError:
    error = StoreError("the service does not answer", where="s3://bucket", fix="try later")
    error.__cause__ = ConnectionError("refused")
    return error


def test_O16_M5_only_an_outage_is_tried_again_and_only_twice() -> None:
    lines: list[str] = []
    with pytest.raises(RetryRequested) as requested, errors_as_failures(retries=True, log=lines.append):
        raise outage()
    assert (requested.value.max_retries, requested.value.seconds_to_wait) == (2, 90)
    assert lines == ["warning: the service does not answer; a step is tried 3 times in all (s3://bucket)"]
    for error, retries in ((outage(), False), (StoreError("a", where="b", fix="c"), True)):
        with pytest.raises(Failure), errors_as_failures(retries=retries):
            raise error


@pytest.mark.parametrize(("num_outages", "attempts"), [(1, 2), (5, 3)])
def test_M5_a_step_of_a_real_run_is_repeated_after_an_outage(
    monkeypatch: pytest.MonkeyPatch, num_outages: int, attempts: int
) -> None:
    monkeypatch.setattr(failures, "RETRY_DELAY_S", 0)
    tried: list[int] = []

    @asset
    def rose(context: AssetExecutionContext) -> None:
        with errors_as_failures(retries=True):
            tried.append(context.retry_number)
            if len(tried) <= num_outages:
                raise outage()

    with DagsterInstance.ephemeral() as instance:
        result = materialize([rose], instance=instance, raise_on_error=False)
        assert tried == list(range(attempts))
        assert result.success == (num_outages < attempts)
        if not result.success:
            (failure,) = result.get_step_failure_events()
            data = failure.step_failure_data.user_failure_data
            assert data is not None
            problem = failure_problem(str(data.description), data.metadata)
            assert problem is not None
            assert "the service does not answer" in problem.what


def test_the_fix_of_a_long_message_is_among_the_first_lines() -> None:
    """The event list of Dagster's UI shows about four lines of a message."""
    rows = "\n".join(f"photos/{number}.jpg" for number in range(30))
    with pytest.raises(Failure) as raised, errors_as_failures():
        raise StoreError("30 images have no caption", where=rows, fix="write the captions")
    assert "write the captions" in str(raised.value.description).splitlines()[1]
    text = str(failure_problem(str(raised.value.description), raised.value.metadata))
    assert text.startswith("StoreError: 30 images have no caption\n  where: photos/0.jpg\n")
    assert text.endswith("\n  fix:   write the captions")


def test_a_failure_of_other_code_has_no_parts() -> None:
    assert failure_problem("something", {}) is None


def test_an_error_of_the_operating_system_becomes_a_failure_that_names_the_path() -> None:
    with pytest.raises(Failure) as raised, errors_as_failures():
        raise OSError(errno.ENOSPC, "No space left on device", "/mnt/small/tables/x.parquet")
    assert raised.value.metadata["what"].value == "the disk is full (ENOSPC)"
    assert raised.value.metadata["where"].value == "/mnt/small/tables/x.parquet"


def test_any_other_error_is_a_bug_and_keeps_its_type() -> None:
    with pytest.raises(ZeroDivisionError), errors_as_failures():
        raise ZeroDivisionError
