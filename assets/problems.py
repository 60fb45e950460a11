"""What, where and fix of an error that ended a step, a run or a command, as text for a terminal."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dagster import DagsterEvent, DagsterExecutionInterruptedError

from pipeline.errors import LatentlineError
from pipeline.recipe.check_specs import SPECS
from pipeline.storage.os_errors import SQLITE_FIXES, as_file_access_error
from resources.failures import failure_text

BUG = "this is a bug in Latentline or in a package it uses: report it with the traceback above"
STOPPED = "stopped by SIGINT, SIGTERM or Dagster"
FINISHED_WORK = "finished work is kept"

_DATABASE_FIX = (
    "check that the database accepts connections from this machine, and `storage` in dagster.yaml; then "
    "start the command again; finished work is kept"
)


def command_problem(err: BaseException, command: str) -> str:
    """Return what, where and fix of an error that ended `command`; the fix is `BUG` if it is unexpected."""
    causes = list(_causes(err))
    for cause in causes:
        if isinstance(cause, LatentlineError):
            return f"{type(cause).__name__}: {cause}"

    if is_interruption(err):
        fix = f"start it again; {FINISHED_WORK}"
        return f"Stopped: the command was {STOPPED}\n  where: {command}\n  fix:   {fix}"

    for message, fix in SQLITE_FIXES.items():
        if message in str(err):
            where = _dagster_home()
            return f"Dagster cannot write its history: {message}\n  where: {where}\n  fix:   {fix}"
    for cause in causes:
        if type(cause).__module__.startswith("sqlalchemy"):
            return _database_problem(str(cause))

    what = f"{type(err).__name__}: {str(err).strip()}".replace("\n", "\n    ")
    return f"{what}\n  where: {command}\n  fix:   {_command_fix(err)}"


def is_interruption(err: BaseException) -> bool:
    """Return whether a command ended because it was stopped."""
    return isinstance(err, DagsterExecutionInterruptedError | KeyboardInterrupt)


def between_steps_problem(event: DagsterEvent) -> str:
    """Return what, where and fix of the failure of a run by an error outside of its steps."""
    errors = list(_stored_causes(event.job_failure_data.error))
    if (problem := _stored_database_problem(errors)) is not None:
        return problem
    what = errors[-1].message.strip().replace("\n", "\n    ") if errors else "the run failed"
    return f"{what}\n  where: between two steps\n  fix:   {BUG}"


def _stored_causes(error: Any) -> Iterator[Any]:
    """Yield an error of an event, the error that caused it, and so on."""
    while error is not None:
        yield error
        error = error.cause or error.context


def _stored_database_problem(errors: Iterable[Any]) -> str | None:
    """Return what, where and fix if one of the errors is that of a database, or None."""
    for error in errors:
        if error.message.startswith("sqlalchemy."):
            return _database_problem(error.message.partition(": ")[2])
    return None


def _database_problem(detail: str) -> str:
    what = f"Dagster's database cannot be used: {' '.join(detail.split())}"
    return f"{what}\n  where: {_dagster_home()}\n  fix:   {_DATABASE_FIX}"


def _dagster_home() -> str:
    home = os.environ.get("DAGSTER_HOME", "")
    return f"{home} (DAGSTER_HOME)" if home else f"{Path.cwd()} (DAGSTER_HOME is not set)"


def _causes(err: BaseException) -> Iterator[BaseException]:
    """Yield the error, the error that caused it, and so on."""
    cause: BaseException | None = err
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _command_fix(err: BaseException) -> str:
    access_error = as_file_access_error(err)
    if access_error is not None:
        return access_error.fix
    if type(err).__module__.startswith("dagster"):
        return "compare the command and its configuration with the names in the message"
    return BUG


def step_problem(event: DagsterEvent, output_dirs: Mapping[str, Path]) -> str:
    """Return what, where and fix of a failed step."""
    failure = event.step_failure_data
    recipe, _ = _step_asset(event)

    # An error of ours is a Dagster Failure with the three parts (resources/failures.py).
    user_failure = failure.user_failure_data
    text = user_failure and failure_text(str(user_failure.description), user_failure.metadata)
    if text:
        return text.replace("<recipe>", recipe)

    if (problem := _stored_database_problem(_stored_causes(failure.error))) is not None:
        return problem

    # Anything else is a bug: the innermost error and its line help most.
    where = _step_location(event, output_dirs)
    error = failure.error
    while error is not None and error.cause is not None:
        error = error.cause
    if error is None:
        return f"{where} failed\n  where: {where}\n  fix:   {BUG}"
    line = "".join(error.stack[-1:]).strip().split("\n")[0]
    what = error.message.strip().replace("\n", "\n    ")
    return f"{what}\n  where: {where}\n         {line}\n  fix:   {BUG}"


def stopped_step_problem(
    event: DagsterEvent, output_dirs: Mapping[str, Path], started_s: float | None, restart: str
) -> str:
    """Return what, where and how to continue for an interrupted step.

    Args:
        event: The failure.
        output_dirs: `output_dir` by recipe name.
        started_s: Start of the run as a Unix time; None if the run never started.
        restart: How to continue, as an imperative.
    """
    recipe, asset = _step_asset(event)
    trains = recipe in output_dirs and asset == "trained_lora"
    checkpoint = _newest_checkpoint(output_dirs[recipe], started_s or 0.0) if trains else None
    return stopped_problem(_step_location(event, output_dirs), restart, checkpoint)


def stopped_problem(where: str, restart: str, checkpoint: Path | None = None) -> str:
    """Return what, where and how to continue for an interrupted run; `restart` is an imperative."""
    if checkpoint is None:
        fix = f"{restart}; {FINISHED_WORK}"
    else:
        where = f"{where}\n         checkpoint {checkpoint}"
        fix = f"{restart}; it resumes from this checkpoint"
    return f"Stopped: the run was {STOPPED}\n  where: {where}\n  fix:   {fix}"


def _step_asset(event: DagsterEvent) -> tuple[str, str]:
    """Return recipe and asset of a step named `<recipe>__<asset>`."""
    recipe, _, asset = str(event.step_key).rpartition("__")
    return recipe, asset


def _step_location(event: DagsterEvent, output_dirs: Mapping[str, Path]) -> str:
    recipe, asset = _step_asset(event)
    is_asset = recipe in output_dirs and asset in SPECS
    return f"asset {recipe}/{asset}" if is_asset else f"step {event.step_key}"


def _newest_checkpoint(output_dir: Path, since_s: float) -> Path | None:
    """Return the newest complete checkpoint of the training run that started last, or None.

    A training run writes run.json when it starts; one from before `since_s` belongs to another Dagster run.
    """
    starts = [file for file in output_dir.glob("runs/*/run.json") if _modified_s(file) >= since_s]
    if not starts:
        return None
    markers = max(starts, key=_modified_s).parent.glob("checkpoints/*/COMPLETE")
    newest = max(markers, key=_modified_s, default=None)
    return newest.parent if newest is not None else None


def _modified_s(path: Path) -> float:
    return path.stat().st_mtime
