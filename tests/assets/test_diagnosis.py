"""The asset `diagnosis`: only recipes with the section have it, between the caches and training."""

from __future__ import annotations

from pathlib import Path

from dagster import AssetKey

from assets.code_version import code_version
from assets.definitions import build_definitions
from pipeline.recipe.check_specs import SPECS
from tests.small_recipe import small_recipe

KEY = AssetKey(["flowers", "diagnosis"])


def test_a_recipe_with_the_section_has_the_asset_between_caches_and_training(tmp_path: Path) -> None:
    repository = build_definitions([small_recipe(tmp_path, diagnosis={})]).get_repository_def()
    graph = repository.asset_graph
    own_keys = {key for key in graph.get_all_asset_keys() if key.path[0] == "flowers"}
    assert own_keys == {KEY, *(AssetKey(["flowers", name]) for name in SPECS)}
    caches = {AssetKey(["flowers", name]) for name in ("vae_latents", "text_embeddings")}
    model = AssetKey(["source_models", "models", "none"])
    assert graph.get(KEY).parent_keys == {*caches, model}
    assert KEY in graph.get(AssetKey(["flowers", "trained_lora"])).parent_keys
    cached = repository.get_job("flowers_cache").asset_layer.selected_asset_keys
    assert {key.path[-1] for key in cached} == set(SPECS) - {"trained_lora"}
    assert KEY in repository.get_job("flowers_train").asset_layer.selected_asset_keys


def test_the_section_changes_the_code_version_of_no_other_asset(tmp_path: Path) -> None:
    without, recipe = small_recipe(tmp_path), small_recipe(tmp_path, diagnosis={})
    assert {name: code_version(without, name) for name in SPECS} == {
        name: code_version(recipe, name) for name in SPECS
    }


def test_a_section_without_a_measurement_adds_no_asset(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, diagnosis={"captions": False})
    assert recipe.optional_assets == ()
