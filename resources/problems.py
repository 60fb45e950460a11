"""What, where and fix of an error that ended a step, a run or a command."""

from __future__ import annotations

import os
import re
import sqlite3
import traceback
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from dagster import DagsterEvent, DagsterExecutionInterruptedError

from pipeline.errors import LatentlineError
from pipeline.recipe.check_specs import ALL_SPECS
from pipeline.storage.os_errors import SQLITE_FIXES, as_file_access_error
from resources.failures import Problem, failure_problem
from resources.step_names import step_asset

REPORT = "report it with the traceback above"
"""Part of a fix that needs the traceback."""

BUG = f"this is a bug in Latentline or in a package it uses: {REPORT}"
OTHER_STEP = "read the traceback above; report it if the step is one of Latentline's"
INTERRUPTIONS = (DagsterExecutionInterruptedError, KeyboardInterrupt)

_OUR_ERRORS = "pipeline.errors."

# Undocumented: the class that the multiprocess executor stores for a step, and the text that executors with
# a process, container or pod per step store without a class.
_DEAD_PROCESS = "ChildProcessCrashException"
_DEAD_POD = re.compile(r"Step \S+ failed health check: (?P<reason>.*)", re.DOTALL)

_RESTART = "start the job again; finished work is kept"
_DEAD_PROCESS_FIX = (
    "read in Dagster's log of the run which signal or exit status ended it. After SIGKILL, memory has "
    f"probably run out: free memory or raise the memory limit. Then {_RESTART}"
)
_DEAD_POD_FIX = (
    "read why it ended, for example with `kubectl describe pod`. If it says OOMKilled, raise the memory "
    f"limit of the pod. Then {_RESTART}"
)

_DATABASE_FIX = (
    "check that the database accepts connections from this machine, and `storage` in dagster.yaml; then "
    "start the command again; finished work is kept"
)


_DAMAGED_DATABASE = (
    "database disk image is malformed",
    "file is not a database",
    "malformed database schema",
)
"""Parts of SQLite's messages about a damaged file."""

_DAMAGED_RECORD = ("(sqlite3.OperationalError) no such ", "Could not decode to UTF-8 column")
"""The same about a damaged name in the schema, or a damaged text."""

_HISTORY_FOLDERS = ("history", "schedules")

# Undocumented: errors about a damaged history and a wrong dagster.yaml have no classes of their own.
_STORAGE_CODE = tuple(f"/dagster/_core/storage/{part}/" for part in ("runs", "event_log", "schedules"))
"""Parts of the paths of Dagster's code that reads and writes its history."""

_CONFIGURATION = "dagster.yaml"

_CONFIGURATION_CODE = "/dagster/_core/instance/config.py"


def error_problem(error: Any, where: str) -> Problem:
    """Return the problem of an error outside of the steps; the fix is `BUG` if it is unexpected.

    `error` is an exception, or the error of an event as Dagster stores it. `where` is used if it names no
    place itself.
    """
    for each in _causes(error):
        if isinstance(each, LatentlineError):
            return _problem_of(each)

    messages = list(_messages(error))
    for message in messages:
        if message.startswith(_OUR_ERRORS):
            return _stored_problem(message.removeprefix(_OUR_ERRORS))
    if (problem := _storage_problem(messages)) is not None:
        return problem
    if isinstance(error, BaseException) and (access_error := as_file_access_error(error)) is not None:
        return _problem_of(access_error)

    frames = "".join(_frames(error))
    if isinstance(error, BaseException) and any(part in frames for part in _STORAGE_CODE):
        return _damaged_record(messages[0])

    fix = BUG
    if _CONFIGURATION in messages[0] or _CONFIGURATION_CODE in frames:
        where = str(_dagster_home() / _CONFIGURATION)
        fix = "correct the file, or copy .dagster/dagster.yaml from Latentline's repository"
    elif messages[0].startswith("dagster."):
        fix = "compare the command and its configuration with the names in the message"
    kind, separator, text = messages[0].partition(": ")
    return Problem(_indented(kind.rpartition(".")[2] + separator + text), where, fix)


def _problem_of(error: LatentlineError) -> Problem:
    return Problem(f"{type(error).__name__}: {error.what}", error.where, error.fix)


def _stored_problem(message: str) -> Problem:
    """Return the problem in the message of an event, which Dagster stores in place of the error."""
    what, _, rest = message.partition("\n  where: ")
    where, _, fix = rest.partition("\n  fix:   ")
    return Problem(what, *(part.replace("\n         ", "\n") for part in (where, fix)))


def _causes(error: Any) -> Iterator[Any]:
    """Yield an error, then its cause, and so on."""
    while error is not None:
        yield error
        if isinstance(error, BaseException):
            error = error.__cause__ or error.__context__
        else:
            error = error.cause or error.context


def _messages(error: Any) -> Iterator[str]:
    """Yield type and message of an error and of its causes."""
    for each in _causes(error):
        is_exception = isinstance(each, BaseException)
        message = "".join(traceback.format_exception_only(each)) if is_exception else each.message
        yield message.strip()


def _frames(error: Any) -> Iterator[str]:
    """Yield the lines of the traceback of an error and of its causes."""
    for each in _causes(error):
        if isinstance(each, BaseException):
            yield from traceback.format_tb(each.__traceback__)


def _damaged_record(message: str) -> Problem:
    # SQLite has no checksums, so damage to a text of the history is found when Dagster interprets it.
    home = _dagster_home()
    folders = " and ".join(str(home / name) for name in _HISTORY_FOLDERS)
    what = f"a record of Dagster's history cannot be read: {_indented(message)}"
    fix = f"move {folders} to another folder and start the command again; Dagster creates empty ones, and "
    fix += f"tables, caches and LoRAs are kept. If the same error comes again, {REPORT}"
    return Problem(what, f"{home} (DAGSTER_HOME)", fix)


def _storage_problem(messages: list[str]) -> Problem | None:
    home = os.environ.get("DAGSTER_HOME", "")
    where = f"{home} (DAGSTER_HOME)" if home else f"{Path.cwd()} (DAGSTER_HOME is not set)"
    if any(text in message for text in _DAMAGED_DATABASE for message in messages):
        file = _damaged_database(_dagster_home())
        if file is not None:
            fix = f"move {file} to another folder and start the command again; Dagster creates an empty one, "
            fix += "and tables, caches and LoRAs are kept"
            return Problem("a file of Dagster's history is damaged", str(file), fix)
    for text, fix in SQLITE_FIXES.items():
        if any(text in message for message in messages):
            return Problem(f"Dagster cannot write its history: {text}", where, fix)
    for message in messages:
        if any(text in message for text in _DAMAGED_RECORD):
            return _damaged_record(" ".join(message.partition(": ")[2].split())[:200])
        if message.startswith("sqlalchemy."):
            detail = " ".join(message.partition(": ")[2].split())
            return Problem(f"Dagster's database cannot be used: {detail}", where, _DATABASE_FIX)
    return None


def _dagster_home() -> Path:
    return Path(os.environ.get("DAGSTER_HOME") or Path.cwd())


def _damaged_database(home: Path) -> Path | None:
    # SQLite's messages do not name the file.
    for file in sorted(home.rglob("*.db")):
        try:
            with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as database:
                is_sound = database.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
        except sqlite3.Error:
            is_sound = False
        if not is_sound:
            return file
    return None


def _indented(message: str) -> str:
    return message.replace("\n", "\n    ")


def step_problem(event: DagsterEvent, output_dirs: Mapping[str, Path]) -> Problem:
    """Return the problem of a failed step; `output_dirs` has each recipe's folder by name."""
    failure = event.step_failure_data
    recipe, _ = step_asset(event.step_key)

    # An error of ours is a Dagster Failure with the three parts (resources/failures.py).
    user_failure = failure.user_failure_data
    problem = user_failure and failure_problem(str(user_failure.description), user_failure.metadata)
    if problem:
        return problem

    if (problem := _storage_problem(list(_messages(failure.error)))) is not None:
        return problem

    where, error = _step_location(event, output_dirs), failure.error
    if error is not None and (problem := _dead_process(error, where)) is not None:
        return problem

    # Anything else is a bug, in a project with other assets perhaps theirs: the innermost error and its line
    # help most.
    bug = BUG if recipe in output_dirs else OTHER_STEP
    while error is not None and error.cause is not None:
        error = error.cause
    if error is None:
        return Problem(f"{where} failed", where, bug)
    line = "".join(error.stack[-1:]).strip().split("\n")[0]
    return Problem(_indented(error.message.strip()), f"{where}\n{line}", bug)


def _dead_process(error: Any, where: str) -> Problem | None:
    """Return the problem of a step that an executor has found dead; None for any other error."""
    what = "ended without reporting an error"
    if error.cls_name == _DEAD_PROCESS:
        return Problem(f"the process of the step {what}", where, _DEAD_PROCESS_FIX)
    if error.cls_name is None and (found := _DEAD_POD.fullmatch(error.message.strip())) is not None:
        reason = _indented(found["reason"])
        return Problem(f"the process or pod of the step {what}: {reason}", where, _DEAD_POD_FIX)
    return None


def stopped_step_problem(
    event: DagsterEvent, output_dirs: Mapping[str, Path], started_s: float | None, restart: str
) -> Problem:
    """Return what, where and how to continue for an interrupted step; see `step_problem`.

    `started_s` is the start of the run as a Unix time; None if it never started. `restart` is an imperative.
    """
    recipe, asset = step_asset(event.step_key)
    trains = recipe in output_dirs and asset == "trained_lora"
    checkpoint = _newest_checkpoint(output_dirs[recipe], started_s or 0.0) if trains else None
    return stopped_problem(_step_location(event, output_dirs), restart, checkpoint)


def stopped_problem(where: str, restart: str, checkpoint: Path | None = None) -> Problem:
    """Return what, where and how to continue for an interrupted run; `restart` is an imperative."""
    if checkpoint is None:
        fix = f"{restart}; finished work is kept"
    else:
        where = f"{where}\ncheckpoint {checkpoint}"
        fix = f"{restart}; it resumes from this checkpoint"
    return Problem("Stopped: the run was stopped by SIGINT, SIGTERM or Dagster", where, fix)


def _step_location(event: DagsterEvent, output_dirs: Mapping[str, Path]) -> str:
    recipe, asset = step_asset(event.step_key)
    is_asset = recipe in output_dirs and asset in ALL_SPECS
    return f"asset {recipe}/{asset}" if is_asset else f"step {event.step_key}"


def _newest_checkpoint(output_dir: Path, since_s: float) -> Path | None:
    """Return the newest complete checkpoint of the training run that started last, or None."""
    # A training run writes run.json when it starts. One from before `since_s` belongs to another Dagster run.
    starts = [file for file in output_dir.glob("runs/*/run.json") if _modified_s(file) >= since_s]
    if not starts:
        return None
    markers = max(starts, key=_modified_s).parent.glob("checkpoints/*/COMPLETE")
    newest = max(markers, key=_modified_s, default=None)
    return newest.parent if newest is not None else None


def _modified_s(path: Path) -> float:
    return path.stat().st_mtime
