"""What, where and fix of an error that ended a command; test_run_summary.py has those of steps and runs."""

import re
from pathlib import Path

import pytest
from dagster import DagsterInstance, DagsterInvariantViolationError

from pipeline.errors import StoreError
from resources.problems import error_problem
from tests.damage import DAMAGES


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


@pytest.mark.parametrize("damage", ["cut", "foreign"])
@pytest.mark.parametrize("name", ["history/runs.db", "history/runs/index.db", "schedules/schedules.db"])
def test_the_fix_of_a_damaged_history_names_its_file_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: str
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    read_history()
    DAMAGES[damage](tmp_path / name)
    with pytest.raises(Exception, match="database") as raised:
        read_history()
    problem = error_problem(raised.value, "latentline run flowers")
    assert problem.startswith(f"a file of Dagster's history is damaged\n  where: {tmp_path / name}\n")

    moved = re.search(r"fix:   move (\S+) to another folder and start the command again", problem)
    assert moved is not None
    Path(moved[1]).rename(tmp_path.with_name(f"{tmp_path.name}_moved"))
    read_history()


def read_history() -> None:
    with DagsterInstance.get() as instance:
        assert (instance.get_runs(), instance.all_asset_keys()) == ([], [])


@pytest.mark.parametrize(
    "text", ["This is no mapping\n", "storage: [\n", "concurrency: {pools: {limit: x}}\n"]
)
def test_a_damaged_dagster_yaml_is_named_and_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    (tmp_path / "dagster.yaml").write_text(text)
    with pytest.raises(Exception, match=r"dagster\.yaml") as raised:
        DagsterInstance.get()
    problem = error_problem(raised.value, "latentline run flowers")
    assert f"\n  where: {tmp_path / 'dagster.yaml'}\n  fix:   correct the file, or copy " in problem
    (tmp_path / "dagster.yaml").write_bytes(Path(".dagster/dagster.yaml").read_bytes())
    DagsterInstance.get().dispose()
