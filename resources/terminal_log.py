"""The log of a run for a person at a terminal: one line per finished asset, warnings, and a status line."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, TextIO

from dagster import AssetCheckSeverity, DagsterEvent, DagsterEventType, logger

from pipeline.background import in_background
from pipeline.escaping import printable_lines
from pipeline.log import NOTE, WARNING
from pipeline.reporting.colours import coloured
from pipeline.reporting.progress import duration_text
from resources.gpu_pool import WAITING
from resources.step_names import step_asset

if TYPE_CHECKING:
    from dagster import DagsterInstance, EventLogEntry, InitLoggerContext

TERMINAL_LOGGER = "terminal"
"""Name of the logger in `Definitions` and in run configurations."""

POLL_S = 0.5
"""Seconds between two reads of the event log."""

_PYTHON_LOGGER = "latentline.terminal"
_STANDARD_ERROR = "standard error"
_CLEAR_LINE = "\r\x1b[K"
_NAME_WIDTH = len("validated_dataset")
_DEFAULT_COLUMNS = 80

_DAGSTERS_OWN = ("[pipes]", "Dependencies for step ")
"""Starts of messages that Dagster itself logs in the name of a step."""


@logger
def terminal_logger(context: InitLoggerContext) -> logging.Logger:
    """Log messages and warnings without events, to the stream of `show_run` or to standard error."""
    del context
    python_logger = logging.getLogger(_PYTHON_LOGGER)
    python_logger.setLevel(logging.DEBUG)
    python_logger.propagate = False

    # One process may execute several jobs, and standard error may be another stream for each of them.
    for handler in list(python_logger.handlers):
        if handler.get_name() == _STANDARD_ERROR:
            python_logger.removeHandler(handler)
    if not any(isinstance(handler, TerminalHandler) for handler in python_logger.handlers):
        handler = TerminalHandler(sys.stderr)
        handler.set_name(_STANDARD_ERROR)
        python_logger.addHandler(handler)
    return python_logger


@contextmanager
def show_run(
    stream: TextIO,
    instance: DagsterInstance | None = None,
    *,
    remaining_s: Mapping[str, float] = MappingProxyType({}),
) -> Generator[TerminalHandler]:
    """Write the messages of the run in the body to `stream`, and provide the handler.

    Steps in other processes cannot write to `stream`; with `instance`, messages are read from its event log.
    `remaining_s` is as in `TerminalHandler`.
    """
    handler = TerminalHandler(stream, shows_records=instance is None, remaining_s=remaining_s)
    python_logger = logging.getLogger(_PYTHON_LOGGER)
    python_logger.addHandler(handler)
    try:
        with nullcontext() if instance is None else _event_log_shown(instance, handler):
            yield handler
    finally:
        python_logger.removeHandler(handler)
        handler.close()


def last_remaining_times(instance: DagsterInstance, job_name: str) -> dict[str, float]:
    """Return how long the last successful run of a job took after the end of each step in seconds, by key."""
    from dagster import DagsterRunStatus, RunsFilter

    filters = RunsFilter(job_name=job_name, statuses=[DagsterRunStatus.SUCCESS])
    records = instance.get_run_records(filters, limit=1)
    # Undocumented: no public call returns the durations of steps.
    stats = instance.get_run_step_stats(records[0].dagster_run.run_id) if records else ()
    # Not the sum of the durations of later steps, because some executors run steps at the same time.
    ends_s = {each.step_key: each.end_time for each in stats if each.end_time}
    return {key: max(ends_s.values()) - end_s for key, end_s in ends_s.items()}


@contextmanager
def _event_log_shown(instance: DagsterInstance, handler: TerminalHandler) -> Generator[None]:
    cursor: str | None = None

    def show_new_entries() -> None:
        nonlocal cursor
        has_more = handler.run_id is not None
        while has_more:
            # Undocumented: no public call returns the events of one run.
            new = instance.get_records_for_run(str(handler.run_id), cursor=cursor)
            for record in new.records:
                handler.show_entry(record.event_log_entry)
            cursor, has_more = new.cursor, new.has_more

    def follow(ended: threading.Event) -> None:
        while not ended.wait(POLL_S):
            # The database may be away for a while. A later read gets all entries since the last one.
            with suppress(Exception):
                show_new_entries()

    try:
        with in_background(follow, name="event-log"):
            yield
    finally:
        with suppress(Exception):  # the summary, which follows, reports that the database is away
            show_new_entries()


class TerminalHandler(logging.Handler):
    """Writes the messages of one run.

    On a terminal, the newest message of a step is a status line, which the next one replaces, unless it
    begins with `NOTE` or `WARNING`. Progress bars use the same line. Any other stream receives one line per
    message, with its time of day. Checks that warn are shown as soon as they were evaluated. The line of a
    finished step says how long the rest of the run takes, if an earlier run is known.

    Attributes:
        run_id: Id of the run; None until it has logged something.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        shows_records: bool = True,
        remaining_s: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Write to `stream`, which stays open; without `shows_records`, only what `show_entry` receives.

        `remaining_s` has the seconds that the run needs after the end of each step, as `last_remaining_times`
        returns them.
        """
        super().__init__(logging.DEBUG)
        self._shows_records = shows_records
        self.run_id: str | None = None
        self._stream = stream
        self._has_status_line = stream.isatty()
        self._started_s: dict[str | None, float] = {}
        self._remaining_s = remaining_s

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record of Dagster. The summary reports failures; a bug's traceback is shown here."""
        # Dagster's records have an attribute `dagster_meta`, and `dagster_event` if they are events of a run.
        metadata = getattr(record, "dagster_meta", None)
        if metadata is None:
            return
        self.run_id = metadata["run_id"]
        if self._shows_records:
            self._show(
                getattr(record, "dagster_event", None),
                metadata["step_key"],
                message=str(metadata["orig_message"]),
                level=record.levelno,
                time_s=record.created,
            )

    def show_entry(self, entry: EventLogEntry) -> None:
        """Show an entry of the event log, as `emit` shows a record."""
        level = entry.level if isinstance(entry.level, int) else logging.INFO
        self._show(
            entry.dagster_event,
            entry.step_key,
            message=entry.user_message,
            level=level,
            time_s=entry.timestamp,
        )

    def _show(
        self, event: DagsterEvent | None, step_key: str | None, *, message: str, level: int, time_s: float
    ) -> None:
        name, message = step_asset(step_key)[1], printable_lines(message)
        try:
            if event is not None:
                self._show_event(event, name, time_s)
            elif message.startswith(_DAGSTERS_OWN):
                pass
            elif level >= logging.WARNING:
                self._show_message(name, f"{WARNING}{message}", time_s)
            elif level >= logging.INFO:
                self._show_message(name, message, time_s)
        except OSError:  # a closed terminal must not stop the run
            self._has_status_line = False

    def close(self) -> None:
        """Clear the status line."""
        with suppress(OSError):
            if self._has_status_line:
                self._stream.write(_CLEAR_LINE)
                self._stream.flush()
        super().close()

    def _show_event(self, event: DagsterEvent, name: str, time_s: float) -> None:
        if event.event_type == DagsterEventType.STEP_START:
            self._started_s[event.step_key] = time_s
            if self._has_status_line:
                self._show_message(name, "started", time_s)
        elif event.event_type == DagsterEventType.STEP_SUCCESS:
            # Steps of an executor with a process for each may run at the same time.
            duration = f"{time_s - self._started_s.get(event.step_key, time_s):6.1f} s"
            self._write_line(f"  {name:<{_NAME_WIDTH}}  {duration}{self._left_text(event.step_key)}", time_s)
        elif event.event_type == DagsterEventType.STEP_FAILURE and is_bug(event):
            self._write_line(printable_lines(event.step_failure_data.error_display_string), time_s)
        elif event.event_type == DagsterEventType.ENGINE_EVENT and "pool" in event.engine_event_data.metadata:
            self._show_message(name, WAITING, time_s)
        elif event.event_type == DagsterEventType.ASSET_CHECK_EVALUATION:
            self._show_check(event, name, time_s)

    def _left_text(self, finished: str | None) -> str:
        """Return how long the last run took after a finished step, for the end of the step's line."""
        left_s = self._remaining_s.get(finished or "", 0.0)
        return f"   about {duration_text(left_s)} left, as in the last run" if left_s >= 1 else ""

    def _show_check(self, event: DagsterEvent, name: str, time_s: float) -> None:
        # The summary lists warnings too, but comes after a training that they may make worthless.
        evaluation = event.asset_check_evaluation_data
        if not evaluation.passed and evaluation.severity == AssetCheckSeverity.WARN:
            summary = evaluation.metadata.get("summary")
            text = printable_lines(str(summary.value).split("\n")[0]) if summary else ""
            self._show_message(name, f"{WARNING}{evaluation.check_name}: {text}", time_s)

    def _show_message(self, name: str, message: str, time_s: float) -> None:
        text = f"  {name:<{_NAME_WIDTH}}  {message}"
        if not self._has_status_line or message.startswith((NOTE, WARNING)):
            self._write_line(text, time_s)
            return
        self._stream.write(_CLEAR_LINE + " ".join(text.splitlines())[: self._columns() - 1])
        self._stream.flush()

    def _columns(self) -> int:
        # Of the terminal itself, because standard output is redirected while a run is shown.
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _DEFAULT_COLUMNS
        except (OSError, ValueError):
            return _DEFAULT_COLUMNS

    def _write_line(self, text: str, time_s: float) -> None:
        time_of_day = time.strftime("%H:%M:%S", time.localtime(time_s))
        start = _CLEAR_LINE if self._has_status_line else time_of_day
        self._stream.write(f"{start}{coloured(text, self._stream)}\n")
        self._stream.flush()


def is_bug(event: DagsterEvent) -> bool:
    """Return whether a failed step has neither an error of Latentline's as its cause nor an interruption."""
    failure = event.step_failure_data
    return failure.user_failure_data is None and failure.error_source.value != "INTERRUPT"
