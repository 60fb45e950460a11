"""The composition root: what follows from a recipe, and what loading it imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dagster import AssetKey

from assets import naming
from assets.definitions import build_definitions
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.recipe.gates import PATH_ISOLATION, SPECS

ROOT = Path(__file__).resolve().parents[2]


def recipe(name: str, folder: Path) -> Recipe:
    values = {
        "datasets": [{"name": "photos", "path": folder / "data"}],
        "output_dir": folder / name,
        "model": {"base": "models/none"},
    }
    return recipe_from_mapping(name, values)


def test_a_recipe_gives_six_assets_in_its_group_two_jobs_a_schedule_and_a_sensor(tmp_path: Path) -> None:
    repository = build_definitions([recipe("flowers", tmp_path)]).get_repository_def()
    graph = repository.asset_graph
    assert graph.get_all_asset_keys() == {AssetKey(["flowers", name]) for name in SPECS}
    assert {graph.get(key).group_name for key in graph.get_all_asset_keys()} == {"flowers"}
    assert {"flowers_cache", "flowers_train"} <= {job.name for job in repository.get_all_jobs()}
    assert [schedule.name for schedule in repository.schedule_defs] == ["flowers_recache"]
    assert [sensor.name for sensor in repository.sensor_defs] == ["flowers_dataset_changed"]


def test_the_cache_job_is_all_but_training(tmp_path: Path) -> None:
    repository = build_definitions([recipe("flowers", tmp_path)]).get_repository_def()
    chosen = repository.get_job("flowers_cache").asset_layer.selected_asset_keys
    assert {key.path[-1] for key in chosen} == set(SPECS) - {"trained_lora"}


def test_every_gate_is_a_blocking_check_and_every_warning_is_not(tmp_path: Path) -> None:
    graph = build_definitions([recipe("flowers", tmp_path)]).get_repository_def().asset_graph
    blocking = {(key.asset_key.path[-1], key.name): graph.get(key).blocking for key in graph.asset_check_keys}
    expected = {(asset, spec.name): spec.gate for asset, specs in SPECS.items() for spec in specs}
    assert blocking == {**expected, ("raw_images", PATH_ISOLATION.name): True}


def test_all_six_assets_carry_the_two_founding_checks() -> None:
    for specs in SPECS.values():
        assert {"shape_uniformity", "file_size_outliers"} <= {spec.name for spec in specs}


def test_two_recipes_live_side_by_side(tmp_path: Path) -> None:
    made = build_definitions([recipe("flowers", tmp_path), recipe("faces", tmp_path)]).get_repository_def()
    assert len(made.asset_graph.get_all_asset_keys()) == 2 * len(SPECS)


def test_a_run_may_set_the_time_to_stop_in_and_nothing_else_of_the_resources(tmp_path: Path) -> None:
    job = build_definitions([recipe("flowers", tmp_path)]).resolve_job_def("flowers_train")
    offered = job.run_config_schema.config_type.fields["resources"].config_type.fields
    assert offered.keys() == {"tables", "launcher", "io_manager"}, "the last is Dagster's own"
    tables, launcher = (
        offered[name].config_type.fields["config"].config_type for name in ("tables", "launcher")
    )
    assert list(tables.fields) == []
    assert list(launcher.fields) == ["grace_s"]
    assert "checkpoint" in launcher.fields["grace_s"].description


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
def test_a_setting_of_the_recipe_changes_the_code_version_of_what_it_decides(
    tmp_path: Path, section: str, change: dict[str, object], changed: set[str]
) -> None:
    def versions(made: Recipe) -> dict[str, str | None]:
        graph = build_definitions([made]).get_repository_def().asset_graph
        return {key.path[-1]: graph.get(key).code_version for key in graph.get_all_asset_keys()}

    one = recipe("flowers", tmp_path)
    two = one.model_copy(update={section: getattr(one, section).model_copy(update=change)})
    before, after = versions(one), versions(two)
    assert {name for name in before if before[name] != after[name]} == changed


def test_L04_another_version_of_the_code_changes_the_code_version_of_what_it_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe("flowers", tmp_path)
    before = {asset: naming.code_version(made, asset) for asset in SPECS}
    monkeypatch.setitem(naming._VERSIONS, "vae_latents", (99,))
    assert {asset for asset in SPECS if naming.code_version(made, asset) != before[asset]} == {"vae_latents"}


def test_O03_loading_definitions_imports_nothing_heavy(tmp_path: Path) -> None:
    configs = tmp_path / "configs"
    configs.mkdir()
    (configs / "flowers.yaml").write_text(
        "datasets: [{name: photos, path: data/flowers}]\noutput_dir: out\nmodel: {base: models/none}\n"
    )
    code = "import assets.definitions, json, sys; print(json.dumps([m.split('.')[0] for m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LATENTLINE_CONFIGS": str(configs)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    heavy = {"torch", "diffusers", "transformers", "accelerate", "peft", "polars", "pandera", "numpy", "PIL"}
    assert heavy & set(json.loads(done.stdout)) == set()


def test_no_module_of_assets_defers_its_annotations() -> None:
    for file in (ROOT / "assets").glob("*.py"):
        assert "from __future__ import annotations" not in file.read_text("utf-8"), file
