"""What, where and fix of an error that ended a command; test_run_summary.py has those of steps and runs."""

from pathlib import Path

import pytest
from dagster import DagsterInvariantViolationError

from pipeline.errors import StoreError
from resources.problems import error_problem


@pytest.mark.parametrize(
    ("error", "what", "fix"),
    [
        (ValueError("no such\njob"), "ValueError: no such\n    job", "report it with the traceback above"),
        (DagsterInvariantViolationError("no job x"), "DagsterInvariantViolationError: no job x", "compare"),
        (OSError(28, "No space left", "runs.db"), "FileAccessError: the disk is full", "free space"),
    ],
)
def test_each_kind_of_error_has_its_own_fix(error: BaseException, what: str, fix: str) -> None:
    text = error_problem(error, "dagster job execute")
    assert text.startswith(what)
    assert fix in text[text.index("\n  fix:   ") :]


def test_a_full_disk_below_dagsters_history_is_reported_with_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = RuntimeError("(sqlite3.OperationalError) database or disk is full\n[SQL: INSERT INTO runs]")
    monkeypatch.setenv("DAGSTER_HOME", "/mnt/home")
    assert error_problem(error, "dagster job execute").splitlines() == [
        "Dagster cannot write its history: database or disk is full",
        "  where: /mnt/home (DAGSTER_HOME)",
        "  fix:   free space on that disk and start the command again; finished work is kept",
    ]
    monkeypatch.delenv("DAGSTER_HOME")
    assert f"  where: {Path.cwd()} (DAGSTER_HOME is not set)" in error_problem(error, "dagster job execute")


def test_an_error_of_ours_that_dagster_wrapped_is_the_one_that_is_printed() -> None:
    error = RuntimeError("step")
    error.__cause__ = StoreError("cut short", where="cache/ab", fix="again")
    assert (
        error_problem(error, "dagster job execute")
        == "StoreError: cut short\n  where: cache/ab\n  fix:   again"
    )
