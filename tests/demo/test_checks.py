"""The demo's check runs as a job, and reports scores and pictures on `demo/trained_lora`."""

from __future__ import annotations

from pathlib import Path

import pytest
from dagster import AssetKey, DagsterInstance

from demo.checks import defs
from pipeline.recipe.load import recipe_from_mapping
from tests.demo.drawing_pipeline import DrawingPipeline


@pytest.mark.parametrize(("lora", "passed"), [("lora", True), ("other", False)])
def test_the_check_reports_the_scores_and_the_sheet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: str, passed: bool
) -> None:
    values = {
        "datasets": [{"name": "a", "path": str(tmp_path / "a")}],
        "cache_dir": str(tmp_path / "cache"),
        "output_dir": str(tmp_path / "out"),
        "model": {"base": "base"},
    }
    recipe = recipe_from_mapping("demo", values)
    recipe.output_dir.mkdir()
    pipeline = DrawingPipeline(teaches=lora == "lora")
    monkeypatch.setattr("demo.checks.load_recipe", lambda file: recipe)
    monkeypatch.setattr("demo.learned.load_pipeline", lambda base: pipeline)

    with DagsterInstance.ephemeral() as instance:
        result = defs.resolve_job_def("demo_scores").execute_in_process(instance=instance)
        [evaluation] = result.get_asset_check_evaluations()
    assert evaluation.asset_key == AssetKey(["demo", "trained_lora"])
    assert evaluation.passed == passed
    assert evaluation.metadata["concept_after"].value == (1.0 if passed else 0.0)
    assert "picture_before_after" in evaluation.metadata
