"""The demo's check measures a real LoRA, and its result is in the Dagster instance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from dagster import AssetCheckEvaluation, AssetCheckKey, AssetCheckSeverity, AssetKey, DagsterInstance

from assets.definitions import build_definitions
from demo.checks import demo_recipe, missed_targets, right_captions, sheet_folder
from demo.experiments import changed_demo
from demo.learned import SCORES_FILE, Learned
from pipeline.recipe import Recipe
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

    command = run("demo.checks", "demo")
    assert command.returncode == 1, command.stderr
    assert "demo: concept 0.0" in command.stdout
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


@pytest.fixture
def captioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Return the recipe `demo_captions`, whose scores are compared with those of `demo`."""
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(tmp_path))
    captions = {"from": "model", "model": "demo/captioner"}
    for name in ("demo", "demo_captions"):
        values = {
            "datasets": [{"name": "known", "path": str(tmp_path / "known"), "captions": captions}],
            "cache_dir": str(tmp_path / "cache"),
            "output_dir": str(tmp_path / name),
            "model": {"base": "demo/base"},
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(values), encoding="utf-8")
    return demo_recipe("demo_captions")


def test_right_captions_are_counted_by_the_names_of_the_demo_s_pictures() -> None:
    names = ("red_zorp_white", "orange_zorp_black", "my_own_picture", "my_cat")
    captions = ["a red zorp on a white background"] * len(names)
    table = pl.DataFrame({"path": [f"{name}.png" for name in names], "caption": captions})
    assert right_captions(table) == (1, 2)


def test_the_score_with_a_model_s_captions_is_compared_with_given_ones(captioned: Recipe) -> None:
    learned = Learned(concept_before=0.0, concept_after=0.5, known_before=0.8, known_after=0.8)
    (sentence,) = missed_targets(captioned, learned)
    assert "is unknown: run python -m demo.checks demo first" in sentence

    scores = sheet_folder(demo_recipe("demo")) / SCORES_FILE
    scores.parent.mkdir(parents=True)
    for given, is_missed in ((0.55, False), (0.56, True)):
        scores.write_text(json.dumps({"concept_after": given}), encoding="utf-8")
        assert bool(missed_targets(captioned, learned)) is is_missed


def evaluation_in(home: Path) -> AssetCheckEvaluation:
    """Return the newest result of the check in an instance."""
    key = AssetCheckKey(AssetKey(["demo", "trained_lora"]), "concept_learned")
    with DagsterInstance.from_config(str(home)) as instance:
        record = instance.get_latest_asset_check_evaluation_record(key)
    assert record is not None
    assert record.evaluation is not None
    return record.evaluation
