"""Databases of Dagster stay open during a run: their logs are written to the database once, at its end."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from dagster import AssetKey, AssetMaterialization, DagsterInstance

from resources.open_databases import open_databases


@pytest.fixture
def instance(tmp_path: Path) -> Generator[DagsterInstance]:
    with DagsterInstance.local_temp(str(tmp_path)) as instance:
        yield instance


def logs(folder: Path) -> set[str]:
    """Return the names of the databases with a write-ahead log."""
    return {path.name for path in folder.rglob("*.db-wal")}


def store_event(instance: DagsterInstance) -> None:
    instance.report_runless_asset_event(AssetMaterialization("flowers"))


def test_logs_are_written_at_the_end_and_all_events_are_stored(
    instance: DagsterInstance, tmp_path: Path
) -> None:
    store_event(instance)
    assert logs(tmp_path) == set(), "without open connections, each one deletes the log"
    with open_databases():
        store_event(instance)
        assert "index.db-wal" in logs(tmp_path)
        store_event(instance)
    assert logs(tmp_path) == set()
    assert len(instance.fetch_materializations(AssetKey("flowers"), limit=9).records) == 3
    store_event(instance)
    assert logs(tmp_path) == set(), "the listener is removed"


def test_a_database_that_is_created_in_the_body_stays_open_too(tmp_path: Path) -> None:
    with open_databases(), DagsterInstance.local_temp(str(tmp_path)) as instance:
        store_event(instance)
        assert "index.db-wal" in logs(tmp_path)
        with open_databases():
            store_event(instance)
        assert "index.db-wal" in logs(tmp_path)
    assert logs(tmp_path) == set()
