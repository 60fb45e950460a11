"""What an entry module says while it runs: to Dagster's log under Dagster, to the terminal otherwise."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

from dagster_pipes import DAGSTER_PIPES_CONTEXT_ENV_VAR, open_dagster_pipes

from pipeline.errors import LatentlineError
from pipeline.processes.guard import end_with_parent
from pipeline.processes.launch import ERROR_FILE_VARIABLE
from pipeline.reporting.terminal import ProgressBar, open_progress_bar
from pipeline.storage.atomic import write_text
from pipeline.storage.os_errors import as_file_access_error

PROGRESS_INTERVAL_S = 2.0
"""Least time between two lines of progress; each line is a row in Dagster's event log."""


class Reporter:
    """Takes what an entry module has to say; one a process, for the whole of its life."""

    def __init__(self, say: Callable[[str], None], bar: ProgressBar | None = None) -> None:
        """Hand each line to `say`; progress is shown on `bar` instead, if there is one."""
        self._say = say
        self._bar = bar
        self._last_progress_s = float("-inf")

    def info(self, text: str) -> None:
        """Say `text` at once."""
        self._say(text)

    def progress(self, done: int, total: int, text: str) -> None:
        """Say how far the work is, at most once in `PROGRESS_INTERVAL_S` seconds; the last one always.

        On a bar all of it is drawn, and only the last one said.

        Args:
            done: How many are done by now, from 0 to `total`.
            total: How many there are.
            text: What they are, and what is worth knowing about them: "steps, loss 0.1234".
        """
        if self._bar is not None and done < total:
            self._bar.show(done, total, text)
            return
        now_s = time.monotonic()
        if done >= total or now_s - self._last_progress_s >= PROGRESS_INTERVAL_S:
            self._last_progress_s = now_s
            self._say(f"{done}/{total} {text}")

    def close(self) -> None:
        """Clear the bar."""
        if self._bar is not None:
            self._bar.close()


@contextmanager
def reporter() -> Generator[Reporter]:
    """A `Reporter` around the whole of an entry module; the process ends with its parent from here on.

    Rank 0 under Dagster reports through Dagster Pipes. Any other process prints to standard error. A
    `LatentlineError` that comes out of the body ends the process with status 1 and no traceback: it is
    printed, and left whole for the launching process, which raises it again. So is what the system refuses,
    such as space on a full disk, after its traceback.

    Raises:
        SystemExit: After a `LatentlineError` or a refusal of the system.
    """
    end_with_parent()
    left: BaseException | None = None
    with _channel() as say, closing(Reporter(say, open_progress_bar() if rank() == 0 else None)) as report:
        try:
            yield report
        except (LatentlineError, SystemExit) as err:
            left = err  # kept until the channel is closed, which would report it with its traceback
        except Exception as err:
            left = as_file_access_error(err)
            if left is None:
                raise
            traceback.print_exc()
    if isinstance(left, LatentlineError):
        _leave(left)
    if left is not None:
        raise left


@contextmanager
def _channel() -> Generator[Callable[[str], None]]:
    if DAGSTER_PIPES_CONTEXT_ENV_VAR in os.environ and rank() == 0:
        with open_dagster_pipes() as pipes:
            yield pipes.log.info
    else:
        yield _print


def rank() -> int:
    """This process's index among those of the launch; 0 when it is the only one."""
    return int(os.environ.get("RANK", "0"))


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a terminal is where this is read


def _leave(err: LatentlineError) -> NoReturn:
    _print(f"{type(err).__name__}: {err}")
    file = os.environ.get(ERROR_FILE_VARIABLE)
    if file is not None:
        parts = {"kind": type(err).__name__, "what": err.what, "where": err.where, "fix": err.fix}
        write_text(Path(file), json.dumps(parts))
    sys.exit(1)
