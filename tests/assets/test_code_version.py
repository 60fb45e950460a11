"""The code versions by which Dagster marks assets as stale."""

from __future__ import annotations

import hashlib
import runpy
from pathlib import Path
from typing import Any

import pytest

from assets import code_version as module
from assets.code_version import code_version
from assets.definitions import build_definitions
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.recipe.check_specs import SPECS
from pipeline.recipe.schema import ContextLoraSettings
from tests.small_recipe import small_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return small_recipe(tmp_path)


@pytest.mark.parametrize(
    ("section", "change", "changed"),
    [
        ("latents", {"dtype": "float32"}, {"vae_latents"}),
        ("checks", {"max_image_pixels": 1_000}, {"raw_images", "validated_dataset"}),
        ("checks", {"near_duplicate_bits": 9}, {"validated_dataset"}),
        ("checks", {"max_rejected_fraction": 0.9}, set()),
        ("buckets", {"underfilled": "drop"}, {"aspect_buckets", "trained_lora"}),
        ("model", {"context_lora": ContextLoraSettings(path=Path("a.safetensors"))}, {"trained_lora"}),
    ],
    ids=[
        "dtype",
        "max_image_pixels",
        "near_duplicate_bits",
        "max_rejected_fraction",
        "underfilled",
        "context_lora",
    ],
)
def test_a_recipe_setting_changes_the_code_versions_of_the_assets_it_decides(
    recipe: Recipe, section: str, change: dict[str, object], changed: set[str]
) -> None:
    def versions(recipe: Recipe) -> dict[str, str | None]:
        graph = build_definitions([recipe]).get_repository_def().asset_graph
        return {key.path[-1]: graph.get(key).code_version for key in graph.materializable_asset_keys}

    section_values = getattr(recipe, section).model_copy(update=change)
    before = versions(recipe)
    after = versions(recipe.model_copy(update={section: section_values}))
    assert {name for name in before if before[name] != after[name]} == changed


def test_L04_a_new_algorithm_version_changes_the_code_version_of_its_asset(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {asset: code_version(recipe, asset) for asset in SPECS}
    monkeypatch.setitem(module.ALGORITHM_VERSIONS, "vae_latents", (99,))
    assert {asset for asset in SPECS if code_version(recipe, asset) != before[asset]} == {"vae_latents"}


def test_a_copy_of_the_project_in_another_folder_has_the_same_code_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: list[list[str]] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(module, "project_root", lambda name=name: tmp_path / name)
        copied = small_recipe(tmp_path / name)
        versions.append([code_version(copied, asset) for asset in SPECS])
    assert versions[0] == versions[1]


LORA, TEXT = "trained_lora", "text_embeddings"
OF_DATASETS = {"validated_dataset", LORA}
SETTINGS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "datasets": (
        {"datasets": [{"name": "photos", "path": "/other"}]},
        {"raw_images", *OF_DATASETS},
    ),
    "resolution": (
        {"datasets": [{"name": "photos", "resolution": 512}]},
        {"aspect_buckets", *OF_DATASETS},
    ),
    "flip": (
        {"datasets": [{"name": "photos", "flip": True}]},
        {"vae_latents", *OF_DATASETS},
    ),
    "dropout": (
        {"datasets": [{"name": "photos", "caption_dropout": 0.5}]},
        {TEXT, *OF_DATASETS},
    ),
    "model": ({"model": {"base": "models/other"}}, {"aspect_buckets", "vae_latents", TEXT, LORA}),
    "text": ({"text": {"caption_dropout": 0.5}}, {TEXT, LORA}),
    "training": ({"training": {"seed": 7}}, {LORA}),
    "prompts": ({"training": {"sample_prompts": ["a rose"]}}, {TEXT, LORA}),
    "repeats": ({"datasets": [{"name": "photos", "repeats": 2}]}, OF_DATASETS),
    "exclude": (
        {"datasets": [{"name": "photos", "exclude": ["old"]}]},
        {"raw_images", *OF_DATASETS},
    ),
    "accelerate": ({"accelerate": {"num_processes": 2}}, {LORA}),
    "latents": ({"latents": {"flip": True}}, {"vae_latents"}),
    "buckets": ({"buckets": {"resolution": 512}}, {"aspect_buckets"}),
    "underfilled": ({"buckets": {"underfilled": "drop"}}, {"aspect_buckets", LORA}),
    "max_image_pixels": ({"checks": {"max_image_pixels": 1000}}, {"raw_images", "validated_dataset"}),
    "max_file_bytes": ({"checks": {"max_file_bytes": 1000}}, {"raw_images", "validated_dataset"}),
    "max_decode_bytes": ({"checks": {"max_decode_bytes": 5 * 10**8}}, {"validated_dataset"}),
    "recache": ({"recache": {"enabled": True}}, set()),
}
"""Changes of a recipe, and the assets whose content they decide."""


@pytest.mark.parametrize("name", SETTINGS)
def test_each_section_decides_the_code_versions_of_its_assets_only(recipe: Recipe, name: str) -> None:
    change, changed = SETTINGS[name]
    values = recipe.model_dump(mode="json", include={"datasets", "output_dir", "model"})
    own = {"path": values["datasets"][0]["path"]}
    if "datasets" in change:
        change = {"datasets": [{**own, **each} for each in change["datasets"]]}
    other = recipe_from_mapping("flowers", {**values, **change})
    versions = {asset: (code_version(recipe, asset), code_version(other, asset)) for asset in SPECS}
    assert {asset for asset, (before, after) in versions.items() if before != after} == changed
    assert {len(version) for pair in versions.values() for version in pair} == {12}


VERSIONS = {
    "PREPROCESSING_VERSION": {"validated_dataset", "vae_latents"},
    "LOOK_VERSION": {"validated_dataset"},
    "CAPTIONS_VERSION": {"validated_dataset"},
    "TRAINING_VERSION": {LORA},
}
"""Versions of algorithms, and the assets whose content they decide."""


@pytest.mark.parametrize("version", VERSIONS)
def test_L04_each_algorithm_decides_the_code_versions_of_its_assets(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(f"pipeline.versions.{version}", "another version")
    later = runpy.run_path(str(module.__file__))["code_version"]
    different = {asset for asset in SPECS if later(recipe, asset) != code_version(recipe, asset)}
    assert different == VERSIONS[version]


@pytest.fixture
def editing(recipe: Recipe) -> Recipe:
    """A recipe with references, which a text encoder may see next to the captions."""
    values = recipe.model_dump(mode="json", include={"output_dir", "model"})
    dataset = {"name": "photos", "path": "/data/after", "references": [{"path": "/data/before"}]}
    return recipe_from_mapping("flowers", {**values, "datasets": [dataset]})


def test_L04_the_preparation_of_references_decides_the_text_embeddings(
    editing: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    latents = editing.latents.model_copy(update={"background": (1, 2, 3)})
    other = editing.model_copy(update={"latents": latents})
    changed = {asset for asset in SPECS if code_version(other, asset) != code_version(editing, asset)}
    assert changed == {"vae_latents", TEXT}

    monkeypatch.setattr("pipeline.versions.PREPROCESSING_VERSION", "another version")
    later = runpy.run_path(str(module.__file__))["code_version"]
    changed = {asset for asset in SPECS if later(editing, asset) != code_version(editing, asset)}
    assert changed == VERSIONS["PREPROCESSING_VERSION"] | {TEXT}


def test_the_code_version_of_text_embeddings_without_references_changes_with_the_recipe_format_only() -> None:
    values = {
        "datasets": [{"name": "photos", "path": "/data/photos"}],
        "output_dir": "/data/out",
        "model": {"base": "stabilityai/stable-diffusion-xl-base-1.0"},
    }
    assert code_version(recipe_from_mapping("flowers", values), TEXT) == "3b431e2f7386"


def test_recipes_without_a_context_lora_keep_the_versions_of_recipes_before_that_key(recipe: Recipe) -> None:
    settings = recipe.model_dump_json(include={"latents", "model"}, exclude={"model": {"context_lora"}})
    versions = repr(module.ALGORITHM_VERSIONS["vae_latents"])
    expected = hashlib.sha256((settings + versions).encode()).hexdigest()[:12]
    assert code_version(recipe, "vae_latents") == expected
