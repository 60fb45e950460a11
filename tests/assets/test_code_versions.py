"""The code versions by which Dagster marks assets as stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from assets import code_versions
from assets.code_versions import code_version
from assets.definitions import build_definitions
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.recipe.gates import SPECS


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    values = {
        "datasets": [{"name": "photos", "path": tmp_path / "data"}],
        "output_dir": tmp_path / "out",
        "model": {"base": "models/none"},
    }
    return recipe_from_mapping("flowers", values)


@pytest.mark.parametrize(
    ("section", "change", "changed"),
    [
        ("latents", {"dtype": "float32"}, {"vae_latents"}),
        ("checks", {"max_image_pixels": 1_000}, {"raw_images", "validated_dataset"}),
        ("checks", {"near_duplicate_bits": 9}, {"validated_dataset"}),
        ("checks", {"max_rejected_fraction": 0.9}, set()),
        ("buckets", {"underfilled": "drop"}, {"aspect_buckets", "trained_lora"}),
    ],
    ids=["dtype", "max_image_pixels", "near_duplicate_bits", "max_rejected_fraction", "underfilled"],
)
def test_a_recipe_setting_changes_the_code_versions_of_the_assets_it_decides(
    recipe: Recipe, section: str, change: dict[str, object], changed: set[str]
) -> None:
    def versions(recipe: Recipe) -> dict[str, str | None]:
        graph = build_definitions([recipe]).get_repository_def().asset_graph
        return {key.path[-1]: graph.get(key).code_version for key in graph.get_all_asset_keys()}

    section_values = getattr(recipe, section).model_copy(update=change)
    before = versions(recipe)
    after = versions(recipe.model_copy(update={section: section_values}))
    assert {name for name in before if before[name] != after[name]} == changed


def test_L04_a_new_algorithm_version_changes_the_code_version_of_its_asset(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {asset: code_version(recipe, asset) for asset in SPECS}
    monkeypatch.setitem(code_versions._ALGORITHM_VERSIONS, "vae_latents", (99,))
    assert {asset for asset in SPECS if code_version(recipe, asset) != before[asset]} == {"vae_latents"}
