from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from dagster import DagsterInstance


@pytest.fixture(scope="session")
def dagster_databases(shared_folder: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """Return a folder with the empty databases of an instance, which take Dagster half a second to create."""

    def create(folder: Path) -> None:
        folder.mkdir()
        with DagsterInstance.local_temp(str(folder)):
            pass

    return shared_folder("dagster databases", create)


@pytest.fixture
def home(tmp_path: Path, dagster_databases: Path) -> Path:
    """Return a DAGSTER_HOME without settings and runs."""
    return shutil.copytree(dagster_databases, tmp_path / "home")
