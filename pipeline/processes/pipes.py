"""Messages and errors of an entry module: to Dagster's log under Dagster, to the terminal otherwise."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from dagster_pipes import DAGSTER_PIPES_CONTEXT_ENV_VAR, open_dagster_pipes

from pipeline.errors import LatentlineError
from pipeline.escaping import printable_lines, without_secrets
from pipeline.processes.guard import end_with_parent
from pipeline.processes.launch import ERROR_FILE_VARIABLE, error_to_json
from pipeline.reporting.progress import ProgressLines
from pipeline.reporting.terminal import ProgressBar, open_progress_bar
from pipeline.storage.atomic import write_text
from pipeline.storage.os_errors import as_file_access_error


class Reporter:
    """The log and the progress bar of an entry module."""

    def __init__(self, log: Callable[[str], None], bar: ProgressBar | None = None) -> None:
        """Write lines with `log`, and draw progress on `bar` if there is one."""
        self.lines = ProgressLines(log, bar=bar)
        self._log = log
        self._bar = bar

    def info(self, text: str) -> None:
        """Log `text`."""
        self._log(text)

    def phase(self, text: str) -> None:
        """Report work that cannot be counted, such as "loading the transformer (3/7)"."""
        self.lines.phase(text)

    def progress(self, done: int, total: int, text: str, *, unit: str = "", note: str = "") -> None:
        """Report counted work. Only the last state is logged at once; see `ProgressLines.count`."""
        self.lines.count(done, total, text, unit=unit, note=note)
        if done >= total:
            self.lines.finish(always=True)

    def close(self) -> None:
        """Clear the bar."""
        if self._bar is not None:
            self._bar.close()


@contextmanager
def reporter() -> Generator[Reporter]:
    """Provide the `Reporter` of an entry module, end it with its parent, and hand its error to the launcher.

    Rank 0 under Dagster reports through Dagster Pipes. Any other process prints to standard error. Only rank
    0 reports progress, from a thread that ends with the body.

    A `LatentlineError` of the body ends the process with status 1 and no traceback. It is printed, and
    written to the file from which the launching process raises it again. An error of the operating system,
    such as a full disk, is handled in the same way after its traceback.
    """
    end_with_parent()
    error: BaseException | None = None
    with (
        _log_channel() as log,
        closing(Reporter(log, open_progress_bar() if rank() == 0 else None)) as report,
    ):
        # The error is raised after the channel is closed, which would log it with a traceback otherwise.
        try:
            with report.lines.in_background() if rank() == 0 else nullcontext():
                report.phase("importing torch")
                yield report
        except (LatentlineError, SystemExit) as err:
            error = err
        except Exception as err:
            error = as_file_access_error(err)
            if error is None:
                raise

            # The traceback shows which step failed; the error names only the file.
            traceback.print_exc()

    if isinstance(error, LatentlineError):
        write_error(error)
        sys.exit(1)
    if error is not None:
        raise error


@contextmanager
def _log_channel() -> Generator[Callable[[str], None]]:
    if DAGSTER_PIPES_CONTEXT_ENV_VAR in os.environ and rank() == 0:
        with open_dagster_pipes() as pipes:
            yield lambda text: pipes.log.info(_shown(text))
    else:
        yield _print


def rank() -> int:
    """Return this process's index within the launch; 0 for a single process."""
    return int(os.environ.get("RANK", "0"))


def _shown(text: str) -> str:
    return printable_lines(without_secrets(text))


def _print(text: str) -> None:
    print(_shown(text), file=sys.stderr, flush=True)  # noqa: T201 - the log of a process without Dagster


def write_error(err: LatentlineError) -> None:
    """Write an error for the launching process, which raises it again, and print it."""
    # Written before it is printed, so that `LocalLaunch` can recognise the printed lines.
    file = os.environ.get(ERROR_FILE_VARIABLE)
    if file is not None:
        write_text(Path(file), error_to_json(err))
    _print(f"{type(err).__name__}: {err}")
