"""The asset `sweep`: only recipes with the section have it, after training and in the training job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dagster import AssetKey

from assets.code_version import code_version
from assets.definitions import build_definitions
from pipeline.recipe import Recipe
from pipeline.recipe.check_specs import OPTIONAL_SPECS, SPECS
from tests.small_recipe import small_recipe

KEY = AssetKey(["flowers", "sweep"])


def swept(tmp_path: Path, **sweep: Any) -> Recipe:
    datasets = [{"name": "photos", "path": tmp_path / "data", "validation_fraction": 0.2}]
    sections = {"sweep": sweep} if sweep else {}
    return small_recipe(tmp_path, datasets=datasets, **sections)


def test_a_recipe_with_the_section_has_the_asset_after_trained_lora_with_two_warnings(tmp_path: Path) -> None:
    recipe = swept(tmp_path, grid={"training.seed": [1, 2]})
    repository = build_definitions([recipe]).get_repository_def()
    graph = repository.asset_graph
    own_keys = {key for key in graph.get_all_asset_keys() if key.path[0] == "flowers"}
    assert own_keys == {KEY, *(AssetKey(["flowers", name]) for name in SPECS)}
    inputs = ("vae_latents", "text_embeddings", "trained_lora")
    assert graph.get(KEY).parent_keys == {AssetKey(["flowers", name]) for name in inputs}
    checks = {key.name: graph.get(key).blocking for key in graph.asset_check_keys if key.asset_key == KEY}
    assert checks == {spec.name: False for spec in OPTIONAL_SPECS["sweep"]}
    assert len(checks) == 2

    cached = repository.get_job("flowers_cache").asset_layer.selected_asset_keys
    assert {key.path[-1] for key in cached} == set(SPECS) - {"trained_lora"}
    assert KEY in repository.get_job("flowers_train").asset_layer.selected_asset_keys


def test_the_section_changes_the_code_version_of_no_other_asset(tmp_path: Path) -> None:
    without, recipe = swept(tmp_path), swept(tmp_path, grid={"training.seed": [1, 2]})
    assert {name: code_version(without, name) for name in SPECS} == {
        name: code_version(recipe, name) for name in SPECS
    }
    other = swept(tmp_path, grid={"training.seed": [1, 3]})
    assert code_version(recipe, "sweep") != code_version(other, "sweep")
