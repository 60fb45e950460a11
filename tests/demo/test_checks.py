"""The demo's check measures a real LoRA, and its result is in the Dagster instance."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dagster import AssetCheckKey, AssetCheckSeverity, AssetKey, DagsterInstance

from assets.definitions import build_definitions
from demo.checks import defs
from demo.experiments import changed_demo
from tests.e2e.daemon import make_home


def test_a_lora_that_has_learned_nothing_is_measured_recorded_and_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = changed_demo(tmp_path, training={"steps": 1, "warmup_steps": 0, "sample_every": 0})
    definitions = build_definitions([recipe])
    assert definitions.resolve_job_def("demo_train").execute_in_process().success

    home = make_home(tmp_path / "home")
    places = {"DAGSTER_HOME": str(home), "LATENTLINE_CONFIGS": str(recipe.source.parent)}
    completed = subprocess.run(
        [sys.executable, "-m", "demo.checks"],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 1, completed.stderr
    assert "demo LoRA: concept 0.0" in completed.stdout
    assert "missed: the concept scores 0.0" in completed.stderr

    key = AssetCheckKey(AssetKey(["demo", "trained_lora"]), "concept_learned")
    with DagsterInstance.from_config(str(home)) as instance:
        record = instance.get_latest_asset_check_evaluation_record(key)
        assert record is not None
        assert record.evaluation is not None
        recorded = record.evaluation

        # The job repeats the check from the UI, with the same result.
        monkeypatch.setenv("LATENTLINE_CONFIGS", places["LATENTLINE_CONFIGS"])
        result = defs.resolve_job_def("demo_scores").execute_in_process(instance=instance)
        [repeated] = result.get_asset_check_evaluations()
    for evaluation in (recorded, repeated):
        assert (evaluation.asset_check_key, evaluation.passed) == (key, False)
        assert evaluation.severity == AssetCheckSeverity.WARN
        assert evaluation.description is not None
        assert evaluation.description.startswith("concept 0.0")
        assert "picture_before_after" in evaluation.metadata
    assert recorded.metadata == repeated.metadata
