"""What the terminal shows last."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dagster import DagsterExecutionInterruptedError, DagsterInvariantViolationError

from assets.last_words import stated
from pipeline.errors import StoreError

ENDS = """
import sys
sys.argv = [{command!r}, "job", "execute", "-j", "demo_train"]
from assets.last_words import keep, keep_numbers, listen
listen()
keep_numbers("demo", "demo_train: half done")
keep_numbers("demo", "demo_train: done \u2714")
{then}
"""

FAILS = """
keep("StoreError: one")
keep("StoreError: one")
keep("StoreError: two")
print("Error: Run 123 resulted in failure.", file=sys.stderr)
sys.exit(1)
"""


def ends(command: str, then: str, **variables: str) -> subprocess.CompletedProcess[str]:
    code = ENDS.format(command=command, then=then)
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", ["/venv/bin/dagster", "/lib/python3/dagster/__main__.py"])
def test_each_problem_is_printed_once_after_dagsters_own_last_line(command: str) -> None:
    ended = ends(command, FAILS)
    assert ended.returncode == 1
    assert ended.stdout == ""
    said = "Error: Run 123 resulted in failure.\n\ndemo_train: done \u2714\n"
    assert ended.stderr == f"{said}\nStoreError: one\n\nStoreError: two\n"


def test_a_good_runs_numbers_are_alone_on_standard_output() -> None:
    ended = ends("/venv/bin/dagster", "print('log', file=sys.stderr)")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "\ndemo_train: done \u2714\n", "log\n")


def test_what_a_terminal_cannot_show_is_escaped() -> None:
    ended = ends("/venv/bin/dagster", "", PYTHONIOENCODING="ascii")
    assert ended.stdout == "\ndemo_train: done \\u2714\n"


def test_a_reader_that_is_gone_is_no_error() -> None:
    ended = ends("/venv/bin/dagster", "import os; os.close(1)")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_other_programs_that_import_the_definitions_are_left_alone() -> None:
    ended = ends("/venv/bin/pytest", FAILS)
    assert (ended.stdout, ended.stderr) == ("", "Error: Run 123 resulted in failure.\n")


def test_what_breaks_off_the_command_is_stated_after_its_traceback() -> None:
    ended = ends("/venv/bin/dagster", "raise OSError(28, 'No space left', '/mnt/home/runs.db')")
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr
    assert ended.stderr.rsplit("\n\n", 1)[-1].splitlines() == [
        "OSError: [Errno 28] No space left: '/mnt/home/runs.db'",
        "  where: dagster job execute -j demo_train",
        "  fix:   free space on that disk and start the job again: what is finished is kept",
    ]


@pytest.mark.parametrize(
    ("error", "what", "fix"),
    [
        (ValueError("no such\njob"), "ValueError: no such\n    job", "report it with the traceback above"),
        (DagsterInvariantViolationError("no job x"), "DagsterInvariantViolationError: no job x", "compare"),
        (DagsterExecutionInterruptedError(), "Stopped: the command was stopped by SIGINT", "start it again"),
    ],
)
def test_each_kind_of_error_has_its_words(error: BaseException, what: str, fix: str) -> None:
    text = stated(error)
    assert text.startswith(what)
    assert fix in text[text.index("\n  fix:   ") :]


def test_a_full_disk_below_dagsters_history_names_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "(sqlite3.OperationalError) database or disk is full\n[SQL: INSERT INTO runs]"
    monkeypatch.setenv("DAGSTER_HOME", "/mnt/home")
    what, where, fix = stated(RuntimeError(said)).splitlines()
    assert what == "Dagster cannot keep its history: database or disk is full"
    assert where == "  where: /mnt/home (DAGSTER_HOME)"
    assert fix == "  fix:   free space on that disk and start it again: what is finished is kept"
    monkeypatch.delenv("DAGSTER_HOME")
    assert f"  where: {Path.cwd()}, as DAGSTER_HOME is not set" in stated(RuntimeError(said))


def test_an_error_of_our_own_below_dagsters_is_the_one_that_is_stated() -> None:
    error = RuntimeError("step")
    error.__cause__ = StoreError("cut short", where="cache/ab", fix="again")
    assert stated(error) == "StoreError: cut short\n  where: cache/ab\n  fix:   again"
