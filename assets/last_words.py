"""What the user sees last: a summary, or what is wrong, where, and the fix.

Dagster prints a failed step's stack and ends with "Run ... resulted in failure"; a good run ends in its log.
So what a run came to is kept here, and printed when the process of the `dagster` command ends.
"""

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from dagster import DagsterExecutionInterruptedError

from pipeline.errors import LatentlineError

DEFECT = "this is a defect of Latentline or of a package below it: report it with the traceback above"
STOPPED = "stopped by SIGINT, by SIGTERM or by Dagster"

_HISTORY = {
    "database or disk is full": "free space on that disk and start it again: what is finished is kept",
    "attempt to write a readonly database": "give this user the right to write there, and start it again",
    "disk I/O error": "free space on that disk if it is full (df -h), or see whether it fails (dmesg)",
}
"""What SQLite says of a disk, and the fix; Dagster's history is in its files."""

_numbers: dict[str, str] = {}
_problems: dict[str, None] = {}


def listen() -> None:
    """From now on, what ends this process is stated last, if it is one of a `dagster` command."""
    if not is_dagster_command(sys.argv):
        return
    before = sys.excepthook

    def state(kind: type[BaseException], err: BaseException, trace: TracebackType | None) -> None:
        before(kind, err, trace)
        if not _problems:
            keep(stated(err))

    sys.excepthook = state
    atexit.register(_print_kept)


def keep(text: str) -> None:
    """Print the problem `text` once when this process ends: the run failed, or never began."""
    _problems[text] = None


def keep_numbers(name: str, text: str) -> None:
    """Print the run's numbers `text` when this process ends, in place of any kept as `name` before."""
    _numbers[name] = text


def stated(err: BaseException) -> str:
    """What, where and fix of an error that broke off the whole command."""
    looked_at: BaseException | None = err
    while looked_at is not None:
        if isinstance(looked_at, LatentlineError):
            return f"{type(looked_at).__name__}: {looked_at}"
        looked_at = looked_at.__cause__ or looked_at.__context__
    command = " ".join(["dagster", *sys.argv[1:]])
    if isinstance(err, DagsterExecutionInterruptedError | KeyboardInterrupt):
        fix = "start it again: what is finished is kept"
        return f"Stopped: the command was {STOPPED}\n  where: {command}\n  fix:   {fix}"
    for said, fix in _HISTORY.items():
        if said in str(err):
            return f"Dagster cannot keep its history: {said}\n  where: {_history()}\n  fix:   {fix}"
    what = f"{type(err).__name__}: {str(err).strip()}".replace("\n", "\n    ")
    return f"{what}\n  where: {command}\n  fix:   {_advice(err)}"


def _history() -> str:
    """Where Dagster writes the events of this command's run."""
    home = os.environ.get("DAGSTER_HOME", "")
    return f"{home} (DAGSTER_HOME)" if home else f"{Path.cwd()}, as DAGSTER_HOME is not set"


def _advice(err: BaseException) -> str:
    from pipeline.storage.os_errors import as_file_access_error

    refusal = as_file_access_error(err)
    if refusal is not None:
        return refusal.fix
    if type(err).__module__.startswith("dagster"):
        return "compare the command and its configuration with what the message names"
    return DEFECT


def is_dagster_command(argv: list[str]) -> bool:
    """Whether a process with these arguments is one of the `dagster` command."""
    return "dagster" in Path(argv[0]).parts[-2:]


def _print_kept() -> None:
    """Numbers of a good run go to standard output, alone there; everything of a bad one to standard error."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    stream = sys.stderr if _problems else sys.stdout
    for text in (*_numbers.values(), *_problems):
        _say(stream, f"\n{text}\n")


def _say(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "utf-8"
    with suppress(OSError, ValueError):  # the reader is gone, and the process ends anyway
        os.write(stream.fileno(), text.encode(encoding, "backslashreplace"))
