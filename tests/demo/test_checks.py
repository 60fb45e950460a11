"""The demo's check measures a real LoRA, and its result is in the Dagster instance."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dagster import AssetCheckEvaluation, AssetCheckKey, AssetCheckSeverity, AssetKey, DagsterInstance

from assets.definitions import build_definitions
from demo.experiments import changed_demo
from tests.e2e.daemon import make_home


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lora_that_has_learned_nothing_is_measured_recorded_and_fails_the_check(tmp_path: Path) -> None:
    recipe = changed_demo(tmp_path, training={"steps": 1, "warmup_steps": 0, "sample_every": 0})
    definitions = build_definitions([recipe])
    assert definitions.resolve_job_def("demo_train").execute_in_process().success

    home = make_home(tmp_path / "home")
    places = {"DAGSTER_HOME": str(home), "LATENTLINE_CONFIGS": str(recipe.source.parent)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            env={**os.environ, **places},
            capture_output=True,
            text=True,
            check=False,
        )

    command = run("demo.checks")
    assert command.returncode == 1, command.stderr
    assert "demo LoRA: concept 0.0" in command.stdout
    assert "missed: the concept scores 0.0" in command.stderr
    recorded = evaluation_in(home)

    # The job repeats the check with the same result, as the UI does.
    assert run("dagster", "job", "execute", "-m", "demo.checks", "-j", "demo_scores").returncode == 0
    repeated = evaluation_in(home)
    for evaluation in (recorded, repeated):
        assert not evaluation.passed
        assert evaluation.severity == AssetCheckSeverity.WARN
        assert evaluation.description is not None
        assert evaluation.description.startswith("concept 0.0")
        assert "picture_before_after" in evaluation.metadata
    assert recorded.metadata == repeated.metadata


def evaluation_in(home: Path) -> AssetCheckEvaluation:
    """Return the newest result of the check in an instance."""
    key = AssetCheckKey(AssetKey(["demo", "trained_lora"]), "concept_learned")
    with DagsterInstance.from_config(str(home)) as instance:
        record = instance.get_latest_asset_check_evaluation_record(key)
    assert record is not None
    assert record.evaluation is not None
    return record.evaluation
