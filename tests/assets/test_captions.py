"""The asset `captions`: only recipes with captions from a model have it, before validated_dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dagster import AssetKey

from assets.code_version import code_version
from assets.definitions import build_definitions
from pipeline.recipe import Recipe
from pipeline.recipe.check_specs import SPECS
from tests.small_recipe import small_recipe

KEY = AssetKey(["flowers", "captions"])


def with_model(folder: Path, **captions: Any) -> Recipe:
    recipe = small_recipe(folder)
    values = {"from_": "model", "model": "owner/captioner", **captions}
    settings = recipe.datasets[0].captions.model_copy(update=values)
    dataset = recipe.datasets[0].model_copy(update={"captions": settings})
    return recipe.model_copy(update={"datasets": (dataset, *recipe.datasets[1:])})


def test_a_recipe_with_a_captioning_model_has_the_asset_before_validated_dataset(tmp_path: Path) -> None:
    repository = build_definitions([with_model(tmp_path)]).get_repository_def()
    graph = repository.asset_graph
    own_keys = {key for key in graph.get_all_asset_keys() if key.path[0] == "flowers"}
    assert own_keys == {KEY, *(AssetKey(["flowers", name]) for name in SPECS)}
    model = AssetKey(["source_models", "owner", "captioner"])
    assert graph.get(KEY).parent_keys == {AssetKey(["flowers", "raw_images"]), model}
    parents = graph.get(AssetKey(["flowers", "validated_dataset"])).parent_keys
    assert parents == {KEY, AssetKey(["flowers", "raw_images"])}
    for job in ("flowers_cache", "flowers_train"):
        assert KEY in repository.get_job(job).asset_layer.selected_asset_keys


def test_a_prompt_decides_the_captions_and_not_the_latents(tmp_path: Path) -> None:
    one, other = with_model(tmp_path), with_model(tmp_path, prompt="What is this?")
    changed = {name for name in ("captions", *SPECS) if code_version(one, name) != code_version(other, name)}
    assert {"captions", "validated_dataset"} <= changed
    assert not {"raw_images", "aspect_buckets", "vae_latents", "text_embeddings"} & changed
