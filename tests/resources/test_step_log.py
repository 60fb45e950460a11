"""Lines of a step whose event log is away, in a real instance."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from dagster import AssetExecutionContext, DagsterInstance, asset, materialize

import resources.step_log
from resources.step_log import StepLog, run_log, step_log
from tests.refused_events import MESSAGE, events_refused


def logged_in_step(home: Path, *, refused: Callable[[str], bool]) -> list[str]:
    """Log three lines in a step, some while events are refused; return the stored ones."""

    @asset
    def step(context: AssetExecutionContext) -> None:
        log = StepLog(context)
        for text in ("one", "two", "three"):
            with events_refused(home) if refused(text) else nullcontext():
                log.warning(text)

    with DagsterInstance.local_temp(str(home)) as instance:
        result = materialize([step], instance=instance)
        messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
    return [message for message in messages if message in ("one", "two", "three")]


def test_a_line_that_cannot_be_stored_is_printed_and_later_ones_are_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resources.step_log, "PAUSE_S", 0.0)
    assert logged_in_step(tmp_path, refused=lambda text: text == "two") == ["one", "three"]
    errors = capsys.readouterr().err
    assert "\nWARNING: two\n" in errors
    assert MESSAGE in errors
    assert "WARNING: three" not in errors.splitlines()


def test_after_a_failure_lines_are_printed_without_another_attempt_for_a_while(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert logged_in_step(tmp_path, refused=lambda text: text == "one") == []
    errors = capsys.readouterr().err
    printed = [line for line in errors.splitlines() if line.startswith("WARNING: ")]
    assert printed == ["WARNING: one", "WARNING: two", "WARNING: three"]
    assert errors.count("Dagster's log cannot be written") == 1


@pytest.mark.parametrize("is_refused", [False, True])
def test_control_characters_of_names_become_escapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_refused: bool
) -> None:
    @asset
    def step(context: AssetExecutionContext) -> None:
        with events_refused(tmp_path) if is_refused else nullcontext():
            StepLog(context).warning("bad \x1b[2J\x9b31m\x07\u202egnp sftp://me:pass@host/x")

    shown = "bad \\x1b[2J\\x9b31m\\x07\\u202egnp sftp://***@host/x"
    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        result = materialize([step], instance=instance)
        messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
    assert (shown in messages) != is_refused
    assert shown in capsys.readouterr().err


def test_all_parts_of_a_step_pause_after_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With PostgreSQL away, each further attempt would make the step wait."""

    @asset
    def step(context: AssetExecutionContext) -> None:
        with events_refused(tmp_path):
            run_log(context)("one")
        run_log(context)("two")
        step_log(context).warning("three")

    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        result = materialize([step], instance=instance)
        stored = {entry.user_message for entry in instance.all_logs(result.run_id)}
    assert stored.isdisjoint({"one", "two", "three"})
    assert capsys.readouterr().err.count("Dagster's log cannot be written") == 1
