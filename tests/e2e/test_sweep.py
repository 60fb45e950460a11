"""The asset `sweep` in Dagster: its table, its metadata and its checks."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from dagster import AssetKey, AssetSelection

from pipeline.storage.tables import Tables
from tests.command_line import latentline_command
from tests.e2e.workspace import NAME, Workspace
from tests.waiting import until

KEY = AssetKey([NAME, "sweep"])


def test_the_asset_writes_its_table_and_reports_the_winner_and_its_checks(cached: Workspace) -> None:
    lora = {"rank": 2, "alpha": 2.0, "modules": ["mid_block.*.to_q"]}
    recipe = cached.recipe(
        datasets=[{"name": "photos", "path": str(cached.data), "validation_fraction": 0.4}],
        training={"steps": 2, "batch_size": 2, "validate_every": 2, "sample_every": 0, "lora": lora},
        sweep={
            "grid": {"training.learning_rate": [1e-2, 1e-9]},
            "judge": "validation_loss",
            # The first two rungs of two steps are the same step.
            "halving": {"first": 0.25},
        },
    )
    result = cached.select(AssetSelection.assets(KEY))
    assert result.success
    (event,) = result.asset_materializations_for_node(f"{NAME}__sweep")
    metadata = event.metadata
    table = Tables(recipe.output_dir).read("sweep")
    assert table.select("variant", "step").rows()[0] == (1, 1)
    assert len(table) == 3
    assert [record.data["variant"] for record in metadata["variants"].records] == [1, 2]
    report = json.loads((recipe.output_dir / "reports" / "sweep.json").read_text(encoding="utf-8"))
    assert metadata["steps"].value == report["steps"] == 3
    assert metadata["picture_scores"].value.startswith("![scores](data:image/png")
    checks = {each.check_name: each.passed for each in result.get_asset_check_evaluations()}
    assert checks["variants_finished"]
    assert checks.keys() == {"variants_finished", "sweep_decided"}
    assert not (recipe.output_dir / "lora").exists(), "a sweep publishes nothing"


def num_trained(output: Path) -> int:
    """Return the number of steps of all runs that were trained."""
    return sum(len(file.read_bytes().splitlines()) for file in output.glob("runs/*/logs/metrics.jsonl"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_R21_a_command_that_is_killed_or_stopped_at_ten_points_ends_with_the_table_of_one_that_is_not(
    cached: Workspace,
) -> None:
    lora = {"rank": 2, "alpha": 2.0, "modules": ["mid_block.*.to_q"]}
    recipe = cached.recipe(
        datasets=[{"name": "photos", "path": str(cached.data), "validation_fraction": 0.4}],
        training={"steps": 8, "batch_size": 2, "checkpoint_every": 3, "sample_every": 0, "lora": lora},
        sweep={
            "grid": {"training.learning_rate": [1e-2, 1e-3, 1e-9]},
            "judge": "validation_loss",
            "halving": {"first": 0.5},
        },
    )
    shutil.copytree(recipe.output_dir, pristine := cached.root / "pristine")
    completed = cached.latentline("sweep", NAME)
    assert completed.returncode == 0, completed.stderr
    expected, num_steps = Tables(recipe.output_dir).read("sweep"), num_trained(recipe.output_dir)

    points = random.Random(0).sample(range(1, num_steps), 10)
    for number, point in enumerate(points):
        shutil.rmtree(recipe.output_dir)
        shutil.copytree(pristine, recipe.output_dir)
        killed = subprocess.Popen(
            latentline_command("sweep", NAME),
            env=cached.environment(),
            cwd=cached.root,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(lambda point=point: num_trained(recipe.output_dir) >= point, seconds=600)
        killed.send_signal(signal.SIGKILL if number % 2 else signal.SIGTERM)
        killed.wait(timeout=120)

        # The training process of a killed command ends by itself, and the next command waits for its lock.
        again = cached.latentline("sweep", NAME)
        assert again.returncode == 0, again.stderr
        table = Tables(recipe.output_dir).read("sweep")
        assert table.equals(expected), f"stopped after {point} of {num_steps} steps"
