"""The six steps alternate between two machines that share only an S3 server and a database."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from dagster import DagsterRunStatus
from polars.testing import assert_frame_equal

from pipeline.recipe.check_specs import SPECS
from tests.machines.outputs import TABLES, downloaded, lora, names_at, table
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.machines.pair import Pair


@pytest.mark.timeout(3600)
def test_steps_alternating_between_machines_make_the_tables_and_the_lora_of_one_machine(
    pair: Pair, s3: str, tmp_path: Path
) -> None:
    """One image is broken, so that several steps have rejected samples to pass on."""
    for project in (pair.a, pair.b):
        shutil.copy(project.data / "photo0.txt", project.data / "broken.txt")
        (project.data / "broken.png").write_bytes((project.data / "photo0.png").read_bytes()[:1000])
    checks = {"max_rejected_fraction": 0.5}

    # One machine alone, with all folders on its disk.
    disk = pair.a.machine.disk
    pair.a.write_recipe(cache_dir=str(disk / "cache"), checks=checks)
    alone = pair.a.latentline("run", "small")
    assert alone.returncode == 0, alone.stderr[-3000:]
    expected = pair.a.machine.path("out")

    for project in (pair.a, pair.b):
        project.write_recipe(output_dir=f"{s3}/out", checks=checks)
    for number, asset in enumerate(SPECS):
        project = (pair.a, pair.b)[number % 2]
        step = project.materialize(asset)
        assert step.returncode == 0, (
            f"{asset} on {project.machine.name}: {step.stdout[-3000:]}{step.stderr[-3000:]}"
        )

    actual = downloaded(f"{s3}/out", tmp_path / "actual")
    for name in TABLES:
        assert_frame_equal(table(actual, name), table(expected, name))
    assert table(actual, "rejected")["sample_id"].to_list() == ["photos/broken.png"]
    assert differing_tensors(lora(actual), lora(expected)) == []
    assert [run.name for run in (actual / "runs").glob("*/finished.json")] == ["finished.json"]
    assert {path.name for path in (actual / "runs").iterdir()} == {
        path.name for path in (expected / "runs").iterdir()
    }

    # Each machine has done its own half only, and all six runs are in the common history.
    runs = pair.instance.get_runs()
    assert [run.status for run in runs] == [DagsterRunStatus.SUCCESS] * 7
    assert not pair.b.machine.path("out").exists()
    assert not [name for name in names_at(f"{s3}/out") if name.endswith(("lease", "lock", ".tmp"))]
