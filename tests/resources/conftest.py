from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster import AssetCheckResult, AssetCheckSpec, DagsterInstance, MaterializeResult, asset, materialize

from pipeline.recipe import Recipe
from pipeline.reporting.reports import write_report
from resources.run_summary import RunSummary, summarize_run
from tests.small_recipe import small_recipe


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


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(tmp_path / "configs"))
    return small_recipe(tmp_path, "small")


@pytest.fixture
def run_step(small: Recipe, tmp_path: Path) -> Any:
    """Execute a body as a real run of the asset small/<name>, and return the run's summary."""

    def run(body: Any, asset_name: str = "trained_lora") -> RunSummary:
        check = AssetCheckSpec("loss_fell", asset=["small", asset_name], description="d")

        @asset(key=["small", asset_name], name=None, check_specs=[check])
        def step() -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
            body()
            write_report(small.output_dir, asset_name, {"steps": 3, "launched": True, "first_loss": None})
            yield MaterializeResult()
            yield AssetCheckResult(passed=True)

        with DagsterInstance.ephemeral() as instance:
            try:
                run_id = materialize([step], instance=instance, raise_on_error=False).run_id
            except BaseException:
                [record] = instance.get_run_records()
                run_id = record.dagster_run.run_id
            return summarize_run(instance, run_id, [small, small_recipe(tmp_path / "other", "other")])

    return run
