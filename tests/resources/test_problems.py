"""What, where and fix of an error that ended a command; test_run_problems.py has those of steps and runs."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import dagster as dg
import pytest
from dagster import DagsterInstance, DagsterInvariantViolationError, DagsterRun

from pipeline.errors import StoreError
from resources.problems import error_problem
from tests.damage import DAMAGES
from tests.e2e.daemon import SETTINGS, make_home


@pytest.mark.parametrize(
    ("error", "what", "fix"),
    [
        (ValueError("no such\njob"), "ValueError: no such\n    job", "report it with the traceback above"),
        (DagsterInvariantViolationError("no job x"), "DagsterInvariantViolationError: no job x", "compare"),
        (OSError(28, "No space left", "runs.db"), "FileAccessError: the disk is full", "free space"),
    ],
)
def test_each_kind_of_error_has_its_own_fix(error: BaseException, what: str, fix: str) -> None:
    text = str(error_problem(error, "dagster job execute"))
    assert text.startswith(what)
    assert fix in text[text.index("\n  fix:   ") :]


def test_a_full_disk_below_dagsters_history_is_reported_with_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = RuntimeError("(sqlite3.OperationalError) database or disk is full\n[SQL: INSERT INTO runs]")
    monkeypatch.setenv("DAGSTER_HOME", "/mnt/home")
    assert str(error_problem(error, "dagster job execute")).splitlines() == [
        "Dagster cannot write its history: database or disk is full",
        "  where: /mnt/home (DAGSTER_HOME)",
        "  fix:   free space on that disk and start the command again; finished work is kept",
    ]
    monkeypatch.delenv("DAGSTER_HOME")
    assert f"  where: {Path.cwd()} (DAGSTER_HOME is not set)" in str(
        error_problem(error, "dagster job execute")
    )


def test_an_error_of_ours_that_dagster_wrapped_is_the_one_that_is_printed() -> None:
    error = RuntimeError("step")
    error.__cause__ = StoreError("cut short", where="cache/ab", fix="again")
    assert (
        str(error_problem(error, "dagster job execute"))
        == "StoreError: cut short\n  where: cache/ab\n  fix:   again"
    )


DATABASES = ["history/runs.db", "history/runs/index.db", "schedules/schedules.db"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DAGSTER_HOME with the project's settings and the history of two runs with a check."""
    folder = make_home(tmp_path_factory.mktemp("problems") / "home")

    @dg.asset(name="flowers")
    def flowers() -> None: ...

    @dg.asset_check(asset=flowers)
    def bloom() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    with DagsterInstance.from_config(str(folder)) as instance:
        for _ in range(2):
            assert dg.materialize([flowers, bloom], instance=instance).success
    return folder


def follow(problem: str, home: Path) -> None:
    """Move the files and folders that the fix names, or copy the settings that it names."""
    fix = problem.split("\n  fix:   ")[1]
    if fix.startswith("correct the file, or copy .dagster/dagster.yaml from Latentline's repository"):
        where = problem.split("\n  where: ")[1].splitlines()[0]
        Path(where).write_bytes(SETTINGS.read_bytes())
        return
    moved = re.match(r"move (\S+)(?: and (\S+))? to another folder and start the command again", fix)
    assert moved is not None, problem
    other = home.with_name(f"{home.name}_moved")
    other.mkdir(exist_ok=True)
    for path in filter(None, moved.groups()):
        Path(path).rename(other / Path(path).name)


def read_home(home: Path) -> list[DagsterRun]:
    """Read what commands and Dagster's UI read."""
    with DagsterInstance.get() as instance:
        for key in instance.all_asset_keys():
            instance.get_latest_materialization_event(key)
        instance.all_instigator_state()
        assert Path(instance.root_directory) == home
        return list(instance.get_runs())


def problems_after(source: Path, home: Path, damage: Callable[[Path], None], name: str) -> str | None:
    """Copy a DAGSTER_HOME, damage a file of it, follow the fix of the error, and return the error."""
    shutil.copytree(source, home)
    damage(home / name)
    try:
        read_home(home)
    except Exception as err:
        problem = str(error_problem(err, "latentline run flowers"))
        assert str(home) in problem.split("\n  where: ")[1], problem
        follow(problem, home)
        read_home(home)
        return problem
    return None


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*DATABASES, "dagster.yaml"])
def test_the_fix_of_a_damaged_file_of_dagster_home_works(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: str
) -> None:
    """SQLite and YAML accept an empty file, and some flipped bits change nothing that is read."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    problem = problems_after(home, tmp_path / "home", DAMAGES[damage], name)
    if damage == "foreign" or (damage == "cut" and name.endswith(".db")):
        assert problem is not None
        assert f"\n  where: {tmp_path / 'home' / name}\n" in problem


@pytest.mark.parametrize("old", [b'"run_id": "', b"SUCCESS", b"PipelineRun", b"run_body"])
def test_the_fix_of_a_damaged_text_in_the_history_works(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bytes
) -> None:
    """SQLite returns a text with a flipped bit, and Dagster or its decoder fails on it."""

    def flip_all(path: Path) -> None:
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, old[:-1] + bytes([old[-1] ^ bit])))

    for bit in (1, 0x80):
        monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / f"home{bit}"))
        problem = problems_after(home, tmp_path / f"home{bit}", flip_all, "history/runs.db")
        assert problem is not None
        assert "a bug in Latentline" not in problem


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*DATABASES, "dagster.yaml"])
def test_the_fix_of_any_flipped_bit_in_dagster_home_works(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    numbers = Random(0)
    data = (home / name).read_bytes()
    places = numbers.sample([place for place, byte in enumerate(data) if byte], 200)

    def flip_one(path: Path) -> None:
        path.write_bytes(
            data[:place] + bytes([data[place] ^ (1 << numbers.randrange(8))]) + data[place + 1 :]
        )

    for place in places:
        monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / str(place)))
        problems_after(home, tmp_path / str(place), flip_one, name)


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
    problem = str(error_problem(raised.value, "latentline run flowers"))
    assert f"\n  where: {tmp_path / 'dagster.yaml'}\n  fix:   correct the file, or copy " in problem
    (tmp_path / "dagster.yaml").write_bytes(Path(".dagster/dagster.yaml").read_bytes())
    DagsterInstance.get().dispose()
