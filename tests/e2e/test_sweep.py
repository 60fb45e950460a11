"""The asset `sweep` in Dagster: its table, its metadata and its checks."""

from __future__ import annotations

import json

from dagster import AssetKey, AssetSelection

from pipeline.storage.tables import Tables
from tests.e2e.workspace import NAME, Workspace

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
