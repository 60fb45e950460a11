"""Dagster's instance in PostgreSQL, configured as docs/operations.md describes."""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from dagster import AssetKey, AssetSelection, DagsterInstance, DagsterRunStatus

from tests.command_line import latentline_command
from tests.e2e.daemon import ROOT, make_home, running, until
from tests.e2e.postgres_server import PASSWORD, USER, PostgresServer, postgres_server, programs
from tests.e2e.problems import problem_of

if TYPE_CHECKING:
    from tests.e2e.workspace import Workspace

BIN = programs()
TRAINING = {"batch_size": 2, "checkpoint_every": 300, "sample_every": 0, "lora": {"rank": 2, "alpha": 2.0}}
FAILED_LOG = "Dagster's log cannot be written"

pytestmark = pytest.mark.skipif(BIN is None, reason="PostgreSQL is not installed")


@pytest.fixture
def server() -> Generator[PostgresServer]:
    assert BIN is not None
    with postgres_server(BIN) as running:
        yield running


@pytest.fixture
def home(server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a DAGSTER_HOME with the settings in the documentation."""
    folder = make_home(tmp_path / "home")
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    match = re.search(r"```yaml\n(storage:\n  postgres:\n.*?)```", page, re.DOTALL)
    assert match, "docs/operations.md shows how to configure PostgreSQL"
    storage = match[1].replace("db.example.com", "127.0.0.1").replace("5432", str(server.port))
    with (folder / "dagster.yaml").open("a", encoding="utf-8") as file:
        file.write(f"\n{storage.replace('db_name: dagster', 'db_name: postgres')}")
    monkeypatch.setenv("DAGSTER_PG_USER", USER)
    monkeypatch.setenv("DAGSTER_PG_PASSWORD", PASSWORD)
    return folder


def test_a_run_and_its_assets_are_recorded_in_postgresql(fresh: Workspace, home: Path) -> None:
    asset = AssetKey(["small", "raw_images"])
    with DagsterInstance.from_config(str(home)) as instance:
        assert fresh.select(AssetSelection.assets(asset), instance).success
        (run,) = instance.get_runs()
        assert run.status == DagsterRunStatus.SUCCESS
        assert instance.get_latest_materialization_event(asset)
    assert not (home / "history").exists(), "nothing is in SQLite files"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_continues_although_postgresql_is_away_until_the_log_fails(
    cached: Workspace, home: Path, server: PostgresServer, tmp_path: Path
) -> None:
    cached.recipe(training={**TRAINING, "steps": 1500})
    log = tmp_path / "log"
    environment = {**cached.environment(), "DAGSTER_HOME": str(home)}
    command = cached.command("job", "execute", "-m", "assets.definitions", "-j", "small_train")
    with running(command, environment=environment, cwd=cached.root, log=log) as pid:
        until(
            lambda: any(file.stat().st_size for file in cached.out.glob("runs/*/logs/metrics.jsonl")),
            "the first steps",
            seconds=90,
            log=log,
        )
        server.stop()
        # Dagster tries to connect for about 10 s, first for an observation or a line of the worker.
        until(lambda: FAILED_LOG in log.read_text(), "a line that was not stored", seconds=120, log=log)
        assert not (cached.out / "lora").exists(), "the training is not over"
        server.start()
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "the end", seconds=600, log=log)

    assert PASSWORD not in log.read_text()
    with DagsterInstance.from_config(str(home)) as instance:
        (run,) = instance.get_runs()
        assert (run.job_name, run.status) == ("small_train", DagsterRunStatus.SUCCESS), log.read_text()[
            -3000:
        ]
        assert instance.get_latest_materialization_event(AssetKey(["small", "trained_lora"]))


REFUSE = """
create function refuse() returns trigger language plpgsql as $$ begin
    raise exception 'the database is read-only';
end $$;
create trigger refuse before insert on event_logs for each row
    when (new.dagster_event_type = any ('{ALSO_REFUSED}')
        or new.step_key = 'small__validated_dataset' and new.dagster_event_type not like '%PLANNED')
    execute function refuse();
"""


@pytest.mark.slow
@pytest.mark.parametrize("also_refused", ["", "PIPELINE_FAILURE"], ids=["one_step", "step_and_failure"])
def test_a_database_that_fails_between_two_steps_is_the_reason_that_a_command_prints(
    cached: Workspace, home: Path, server: PostgresServer, also_refused: str
) -> None:
    """In the second case, the database does not store the failure of the run either."""
    with DagsterInstance.from_config(str(home)):
        server.execute(REFUSE.replace("ALSO_REFUSED", also_refused))
    command = cached.command("job", "execute", "-m", "assets.definitions", "-j", "small_cache")
    completed = cached.run(command, DAGSTER_HOME=str(home))
    assert completed.returncode == 1
    assert "\nDagster's database cannot be used: (psycopg2.errors.RaiseException)" in completed.stderr
    assert "`storage` in dagster.yaml" in completed.stderr
    assert "Stopped: " not in completed.stderr
    assert "small_cache: stopped" not in completed.stderr


@pytest.mark.slow
def test_a_run_without_its_database_ends_with_what_to_check(
    cached: Workspace, home: Path, server: PostgresServer
) -> None:
    server.stop()
    problem = problem_of(cached.run(latentline_command("run", "small"), DAGSTER_HOME=str(home)))
    assert problem.what.startswith("Dagster's database cannot be used: (psycopg2.OperationalError)")
    assert problem.where == f"{home} (DAGSTER_HOME)"
    assert "`storage` in dagster.yaml" in problem.fix
