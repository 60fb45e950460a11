"""The asset `evaluation`: only recipes with the section have it, after training and in the training job."""

from __future__ import annotations

from pathlib import Path

from dagster import AssetKey

from assets.code_version import code_version
from assets.definitions import build_definitions
from assets.metadata import publish
from pipeline.recipe.check_specs import OPTIONAL_SPECS, SPECS
from pipeline.reporting.reports import StageResult, read_report
from pipeline.storage.tables import empty
from tests.small_recipe import small_recipe

KEY = AssetKey(["flowers", "evaluation"])


def test_a_recipe_with_the_section_has_the_asset_after_trained_lora_with_four_warnings(
    tmp_path: Path,
) -> None:
    repository = build_definitions([small_recipe(tmp_path, evaluation={})]).get_repository_def()
    graph = repository.asset_graph
    own_keys = {key for key in graph.get_all_asset_keys() if key.path[0] == "flowers"}
    assert own_keys == {KEY, *(AssetKey(["flowers", name]) for name in SPECS)}
    assert graph.get(KEY).parent_keys == {AssetKey(["flowers", "trained_lora"])}
    checks = {key.name: graph.get(key).blocking for key in graph.asset_check_keys if key.asset_key == KEY}
    assert checks == {spec.name: False for spec in OPTIONAL_SPECS["evaluation"]}
    assert len(checks) == 4

    cached = repository.get_job("flowers_cache").asset_layer.selected_asset_keys
    assert {key.path[-1] for key in cached} == set(SPECS) - {"trained_lora"}
    assert KEY in repository.get_job("flowers_train").asset_layer.selected_asset_keys


def test_the_section_changes_the_code_version_of_no_other_asset(tmp_path: Path) -> None:
    without, recipe = small_recipe(tmp_path), small_recipe(tmp_path, evaluation={"pictures": 2})
    assert {name: code_version(without, name) for name in SPECS} == {
        name: code_version(recipe, name) for name in SPECS
    }
    other = small_recipe(tmp_path, evaluation={"pictures": 3})
    assert code_version(recipe, "evaluation") != code_version(other, "evaluation")


def test_the_metadata_have_the_numbers_of_each_step_and_the_reason_in_words(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, evaluation={})
    interval = {"mean": 0.3, "low": None, "high": None, "pictures": 1}
    step = {"step": 4, "strength": 1.0, "learned": interval, "obeys": None, "drift": None, "copies": None}
    report = {"run": "0123", "chosen_step": None, "why": "not decided: few pictures", "steps": [step]}
    report |= {"bleeding": [], "by_scorer": {"dino": [step]}, "absent": {"copies": "the holdout is empty"}}
    result = StageResult(empty("evaluation"), empty("rejected"), report)
    metadata = publish(recipe, "evaluation", result).metadata
    assert metadata["why"].value == "not decided: few pictures"
    assert metadata["steps"].records[0].data["step"] == 4
    written = read_report(recipe.output_dir, "evaluation")
    assert written is not None
    assert written["steps"] == [step]
