"""What the terminal logger writes for real runs of small jobs."""

import io
import logging
import os
import re
import sqlite3
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from dagster import (
    AssetCheckResult,
    AssetCheckSeverity,
    AssetCheckSpec,
    AssetExecutionContext,
    DagsterEvent,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    Definitions,
    EventLogEntry,
    MaterializeResult,
    asset,
    define_asset_job,
)
from dagster._core.events import StepSuccessData

from pipeline.errors import StoreError
from resources.failures import errors_as_failures
from resources.terminal_log import (
    POLL_S,
    TERMINAL_LOGGER,
    TerminalHandler,
    last_remaining_times,
    show_run,
    terminal_logger,
)

Body = Callable[[AssetExecutionContext], object]


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")


def without_times(text: str) -> list[str]:
    """Return the lines without the time of day, which each of them must begin with."""
    lines = text.splitlines()
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", line[:8]) for line in lines), text
    return [line[8:] for line in lines]


def output_of(body: Body, stream: io.StringIO) -> str:
    """Execute an asset with the terminal logger alone, and return the text on the stream."""
    with show_run(stream) as handler:
        assert handler.run_id is None
        assert execute(body) == handler.run_id
    return stream.getvalue()


def execute(body: Body, shared: DagsterInstance | None = None) -> str:
    """Execute an asset with the terminal logger alone, and return the id of the run."""

    @asset(name="small__raw_images")
    def step(context: AssetExecutionContext) -> None:
        body(context)

    job = define_asset_job("small_cache", config={"loggers": {TERMINAL_LOGGER: {}}})
    definitions = Definitions([step], jobs=[job], loggers={TERMINAL_LOGGER: terminal_logger})
    with nullcontext(shared) if shared is not None else DagsterInstance.ephemeral() as instance:
        result = definitions.resolve_job_def("small_cache").execute_in_process(
            instance=instance, raise_on_error=False
        )
    return result.run_id


def test_the_event_log_shows_the_same_lines_as_the_logger() -> None:
    """Steps in other processes write to the event log only."""

    def body(context: AssetExecutionContext) -> None:
        context.log.info("5 image files")
        context.log.warning("no\x1b GPU")
        context.log.debug("details")

    stream = io.StringIO()
    with DagsterInstance.ephemeral() as instance, show_run(stream, instance) as handler:
        assert execute(body, instance) == handler.run_id
    lines = without_times(stream.getvalue())
    assert lines[:2] == ["  raw_images         5 image files", "  raw_images         warning: no\\x1b GPU"]
    finished = lines[2]
    assert finished.startswith("  raw_images  ")
    assert finished.endswith(" s")
    assert len(lines) == 3


def test_the_event_log_is_followed_again_after_an_error_of_its_database(tmp_path: Path) -> None:
    stream = io.StringIO()
    runs = tmp_path / "history" / "runs"

    def shown(text: str) -> bool:
        end_s = time.monotonic() + 60
        while text not in stream.getvalue() and time.monotonic() < end_s:
            time.sleep(0.05)
        return text in stream.getvalue()

    def body(context: AssetExecutionContext) -> None:
        context.log.info("before")
        assert shown("before")
        file = runs / f"{context.run.run_id}.db"
        for source, target in (("event_logs", "away"), ("away", "event_logs")):
            with closing(sqlite3.connect(file, timeout=60)) as connection, connection:
                connection.execute(f"alter table {source} rename to {target}")
            time.sleep(3 * POLL_S)
        context.log.info("after")
        assert shown("after"), "the thread has not ended"

    with DagsterInstance.local_temp(str(tmp_path)) as instance, show_run(stream, instance):
        run = instance.get_run_by_id(execute(body, instance))
    assert run is not None
    assert run.is_success


def log(level: int, *messages: str) -> Body:
    return lambda context: [context.log.log(level, message) for message in messages]


def shown_lines(text: str) -> Sequence[str]:
    """Return the lines that remain on a terminal."""
    return [line.split("\x1b[K")[-1].lstrip("\r") for line in text.split("\n")]


def step_entry(step: str, run_id: str, time_s: float, ended: StepSuccessData | None) -> EventLogEntry:
    """Return the entry of a step's end, or of its start."""
    kind = "STEP_START" if ended is None else "STEP_SUCCESS"
    event = DagsterEvent(kind, "small_cache", step_key=step, event_specific_data=ended)
    return EventLogEntry(None, logging.INFO, "", run_id, time_s, step, "small_cache", event)


def test_a_finished_step_says_how_long_the_rest_took_in_the_last_run() -> None:
    """vae_latents and text_embeddings run at the same time, so their durations must not be added."""
    stream = Terminal()
    seconds = {"raw_images": (0, 2), "vae_latents": (2, 702), "text_embeddings": (2, 302)}
    with DagsterInstance.ephemeral() as instance:
        assert last_remaining_times(instance, "small_cache") == {}
        run = instance.add_run(DagsterRun("small_cache", status=DagsterRunStatus.SUCCESS))
        for name, (start_s, end_s) in seconds.items():
            for time_s, ended in ((start_s, None), (end_s, StepSuccessData(1000.0 * (end_s - start_s)))):
                entry = step_entry(f"small__{name}", run.run_id, 1_790_000_000.0 + time_s, ended)
                instance.store_event(entry)
        remaining_s = last_remaining_times(instance, "small_cache")
        assert remaining_s == {
            "small__raw_images": 700.0,
            "small__vae_latents": 0.0,
            "small__text_embeddings": 400.0,
        }
        with show_run(stream, remaining_s=remaining_s):
            execute(lambda context: None, instance)
    assert stream.getvalue().rstrip("\r\x1b[K\n").endswith(" s   about 11:40 left, as in the last run")


def test_steps_at_the_same_time_have_their_own_durations() -> None:
    stream = Terminal()
    handler = TerminalHandler(stream)
    for time_s, ended, asset_name in (
        (1000.0, None, "vae_latents"),
        (1095.0, None, "text_embeddings"),
        (1100.0, StepSuccessData(100_000.0), "vae_latents"),
        (1101.0, StepSuccessData(6_000.0), "text_embeddings"),
    ):
        handler.show_entry(step_entry(f"small__{asset_name}", "run", time_s, ended))
    assert re.findall(r"(\w+) +(\d+\.\d) s", stream.getvalue()) == [
        ("vae_latents", "100.0"),
        ("text_embeddings", "6.0"),
    ]


def test_a_terminal_keeps_one_line_per_asset_and_each_warning() -> None:
    def body(context: AssetExecutionContext) -> None:
        context.log.info("5 image files")
        context.log.warning("no GPU")
        context.log.debug("details")

    text = output_of(body, Terminal())
    warning, finished, rest = shown_lines(text)
    assert warning == "  raw_images         warning: no GPU"
    assert finished.startswith("  raw_images  ")
    assert finished.endswith(" s")
    assert rest == ""
    assert "\r\x1b[K  raw_images         5 image files\r" in text, "the status line shows the newest message"
    assert "details" not in text


def test_a_terminal_keeps_a_note() -> None:
    text = output_of(log(logging.INFO, "before", "note: run b is new", "after"), Terminal())
    note, finished, _ = shown_lines(text)
    assert note == "  raw_images         note: run b is new"
    assert finished.endswith(" s")
    assert "\r\x1b[K  raw_images         after\r" in text


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="this system has no pseudo-terminals")
def test_a_status_line_is_truncated_to_the_width_of_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to that of standard output, which is redirected while a run is shown."""
    monkeypatch.setenv("COLUMNS", "300")
    controller, device = os.openpty()
    termios.tcsetwinsize(device, (24, 100))

    class WideTerminal(Terminal):
        def fileno(self) -> int:
            return device

    for stream, columns in ((WideTerminal(), 100), (Terminal(), 80)):
        text = output_of(log(logging.INFO, "first\nsecond " + "x" * 180), stream)
        [status] = [part for part in text.split("\r\x1b[K") if "first" in part]
        assert status.startswith("  raw_images         first second xxx")
        assert len(status) == columns - 1
    os.close(controller)
    os.close(device)


def test_a_check_that_warns_is_shown_at_once_and_one_that_passes_is_not() -> None:
    @asset(
        name="small__raw_images", check_specs=[AssetCheckSpec(n, asset="small__raw_images") for n in "abc"]
    )
    def step(context: AssetExecutionContext) -> Iterator[object]:
        yield MaterializeResult()
        metadata = {"summary": "2 odd images\nsecond line"}
        warn = AssetCheckSeverity.WARN
        yield AssetCheckResult(passed=False, check_name="a", severity=warn, metadata=metadata)
        yield AssetCheckResult(passed=True, check_name="b", severity=warn, metadata=metadata)
        yield AssetCheckResult(passed=False, check_name="c", metadata=metadata)
        context.log.info("after the checks")

    stream = io.StringIO()
    job = define_asset_job("small_cache", config={"loggers": {TERMINAL_LOGGER: {}}})
    definitions = Definitions([step], jobs=[job], loggers={TERMINAL_LOGGER: terminal_logger})
    with show_run(stream), DagsterInstance.ephemeral() as instance:
        definitions.resolve_job_def("small_cache").execute_in_process(instance=instance)
    lines = without_times(stream.getvalue())
    assert [line for line in lines if "odd images" in line] == [
        "  raw_images         warning: a: 2 odd images"
    ]


def test_warnings_in_messages_stay_on_a_terminal() -> None:
    text = output_of(log(logging.INFO, "warning: no GPU", "after"), Terminal())
    warning, finished, _ = shown_lines(text)
    assert warning == "  raw_images         warning: no GPU"
    assert finished.endswith(" s")


def test_another_stream_receives_each_message_without_control_characters() -> None:
    text = output_of(log(logging.INFO, "one", "two", "[pipes] opened"), io.StringIO())
    lines = without_times(text)
    assert lines[:2] == ["  raw_images         one", "  raw_images         two"]
    assert len(lines) == 3
    assert "\x1b" not in text


def test_an_error_of_ours_prints_nothing_because_the_summary_has_it() -> None:
    def body(context: AssetExecutionContext) -> None:
        with errors_as_failures():
            raise StoreError("cut short", where="cache/ab", fix="again")

    assert output_of(body, io.StringIO()) == ""


def test_a_bug_prints_its_stack_trace() -> None:
    text = output_of(lambda context: 1 // 0, io.StringIO())
    assert "ZeroDivisionError" in text
    assert "test_terminal_log.py" in text


def test_runs_of_one_process_write_to_the_standard_error_of_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for message in ("one", "two"):
        with io.StringIO() as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            execute(log(logging.INFO, message))
            assert without_times(stream.getvalue())[0] == f"  raw_images         {message}"
