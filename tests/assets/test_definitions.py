"""The definitions that follow from a recipe, and the imports that loading them causes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dagster import AssetKey

from assets.definitions import build_definitions, defs
from assets.names import DEFAULT_RUN_CONFIG
from pipeline.errors import RecipeError
from pipeline.recipe.check_specs import PATH_ISOLATION, SPECS
from resources.run_names import RECIPE_TAG
from tests.small_recipe import small_recipe

DATASETS_WITH_ALL = [
    {"name": "a", "path": "/data/a", "mask": {"path": "/data/m"}, "slider": 1, "validation_fraction": 0.1},
    {"name": "b", "path": "/data/b", "references": [{"path": "/data/c"}], "slider": -1},
]

ROOT = Path(__file__).resolve().parents[2]


def test_a_recipe_has_six_assets_in_its_group_two_jobs_a_schedule_and_a_sensor(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, recache={"enabled": True})
    repository = build_definitions([recipe]).get_repository_def()
    graph = repository.asset_graph
    assert graph.materializable_asset_keys == {AssetKey(["flowers", name]) for name in SPECS}
    assert {graph.get(key).group_name for key in graph.materializable_asset_keys} == {"flowers"}
    assert {"flowers_cache", "flowers_train"} <= {job.name for job in repository.get_all_jobs()}
    assert [schedule.name for schedule in repository.schedule_defs] == ["flowers_recache"]
    assert {sensor.name for sensor in repository.sensor_defs} == {"dead_runs", "flowers_dataset_changed"}


def test_the_cache_job_selects_every_asset_except_the_lora(tmp_path: Path) -> None:
    repository = build_definitions([small_recipe(tmp_path)]).get_repository_def()
    selected = repository.get_job("flowers_cache").asset_layer.selected_asset_keys
    assert {key.path[-1] for key in selected} == set(SPECS) - {"trained_lora"}


def test_the_runs_of_both_jobs_have_the_tag_of_the_recipe_and_log_messages_to_the_terminal(
    tmp_path: Path,
) -> None:
    repository = build_definitions([small_recipe(tmp_path)]).get_repository_def()
    descriptions = {
        "flowers_cache": "Brings tables, latents and text embeddings up to date.",
        "flowers_train": "Brings the cache up to date, then trains the LoRA.",
    }
    for name, description in descriptions.items():
        job = repository.get_job(name)
        assert job.tags[RECIPE_TAG] == "flowers"
        assert job.description == description
        assert job.run_config == DEFAULT_RUN_CONFIG


def test_every_gate_blocks_and_no_warning_does(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, datasets=DATASETS_WITH_ALL)
    graph = build_definitions([recipe]).get_repository_def().asset_graph
    blocking = {(key.asset_key.path[-1], key.name): graph.get(key).blocking for key in graph.asset_check_keys}
    expected = {(asset, spec.name): spec.gate for asset, specs in SPECS.items() for spec in specs}
    assert blocking == {**expected, ("raw_images", PATH_ISOLATION.name): True}


def test_a_warning_that_the_recipe_makes_a_gate_blocks(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, checks={"gates": ["pictures_sharp"]})
    graph = build_definitions([recipe]).get_repository_def().asset_graph
    blocking = {key.name for key in graph.asset_check_keys if graph.get(key).blocking}
    assert "pictures_sharp" in blocking
    assert "pictures_exposed" not in blocking


def test_all_six_assets_have_the_two_founding_checks() -> None:
    for specs in SPECS.values():
        assert {"shape_uniformity", "file_size_outliers"} <= {spec.name for spec in specs}


def test_two_recipes_share_one_code_location(tmp_path: Path) -> None:
    repository = build_definitions(
        [small_recipe(tmp_path), small_recipe(tmp_path, "faces", output_dir=tmp_path / "faces")]
    ).get_repository_def()
    assert len(repository.asset_graph.materializable_asset_keys) == 2 * len(SPECS)
    for job, assets in (("flowers_cache", 5), ("faces_train", 6)):
        selected = repository.get_job(job).asset_layer.selected_asset_keys
        assert {key.path[0] for key in selected} == {job.split("_")[0]}
        assert len(selected) == assets


def test_steps_pools_and_kinds_keep_their_names(tmp_path: Path) -> None:
    """Run configuration, pool limits and saved searches of the UI refer to them.

    The cache steps claim a place in the pool themselves, when they encode (tests/e2e/test_two_runs.py).
    """
    definitions = build_definitions([small_recipe(tmp_path)])
    nodes = {node.name: node.definition for node in definitions.resolve_job_def("flowers_train").nodes}
    assert set(nodes) == {f"flowers__{asset}" for asset in SPECS}
    assert {name.removeprefix("flowers__") for name, op in nodes.items() if op.pool == "gpu"} == {
        "trained_lora"
    }
    graph = definitions.get_repository_def().asset_graph
    kinds = {key.path[-1]: graph.get(key).kinds for key in graph.materializable_asset_keys}
    assert kinds["raw_images"] == {"polars", "parquet"}
    assert kinds["trained_lora"] == {"pytorch", "huggingface", "parquet"}


def test_a_run_can_set_the_grace_period_and_the_machines_of_a_training(tmp_path: Path) -> None:
    job = build_definitions([small_recipe(tmp_path)]).resolve_job_def("flowers_train")
    resources = job.run_config_schema.config_type.fields["resources"].config_type.fields
    assert resources.keys() == {"tables", "launcher", "io_manager"}, "Dagster adds the last one"
    tables, launcher = (
        resources[name].config_type.fields["config"].config_type for name in ("tables", "launcher")
    )
    assert list(tables.fields) == []
    assert list(launcher.fields) == [
        "grace_s",
        "machines",
        "master",
        "wait_s",
        "concurrent_trainings",
        "seal_packs",
    ]
    assert "checkpoint" in launcher.fields["grace_s"].description


def test_definitions_that_a_process_loads_again_follow_the_files_and_warn_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(tmp_path))
    file, deployment = tmp_path / "flowers.yaml", tmp_path / "deployment" / "lab.yaml"
    text = "datasets: [{name: photos, path: data/flowers}]\noutput_dir: out\nmodel: {base: models/none}\n"
    file.write_text(text, encoding="utf-8")
    (tmp_path / "bad.yaml").write_text("bogus: 1\n", encoding="utf-8")
    deployment.parent.mkdir()
    deployment.write_text("executor: {import: multiprocess}\n", encoding="utf-8")

    def schedules() -> list[str]:
        return [each.name for each in defs().get_repository_def().schedule_defs]

    assert schedules() == schedules() == ["bad_recache", "flowers_recache"]
    assert capsys.readouterr().err.count("recipe bad is excluded") == 1
    file.write_text(f"{text}recache: {{cron: null}}\n", encoding="utf-8")
    assert schedules() == ["bad_recache"]
    (tmp_path / "bad.yaml").unlink()
    assert schedules() == []
    monkeypatch.setenv("LATENTLINE_DEPLOYMENT", str(deployment))
    assert defs().resolve_job_def("flowers_cache").executor_def.name == "multiprocess"
    file.write_text("bogus: 1\n", encoding="utf-8")
    assert schedules() == ["flowers_recache"]
    monkeypatch.setenv("LATENTLINE_STRICT", "1")
    with pytest.raises(RecipeError, match="flowers"):
        defs()


def test_O03_loading_definitions_imports_no_heavy_package(tmp_path: Path) -> None:
    configs = tmp_path / "configs"
    configs.mkdir()
    (configs / "flowers.yaml").write_text(
        "datasets: [{name: photos, path: data/flowers}]\noutput_dir: out\nmodel: {base: models/none}\n"
    )
    code = (
        "import json, sys; from assets.definitions import defs; defs(); "
        "print(json.dumps([m.split('.')[0] for m in sys.modules]))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LATENTLINE_CONFIGS": str(configs)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    heavy = {"torch", "diffusers", "transformers", "accelerate", "peft", "polars", "pandera", "numpy", "PIL"}
    assert heavy & set(json.loads(process.stdout)) == set()


def test_no_module_of_assets_postpones_its_annotations() -> None:
    """Dagster reads the annotations of an asset function when it is defined."""
    for file in (ROOT / "assets").glob("*.py"):
        assert "from __future__ import annotations" not in file.read_text("utf-8"), file
