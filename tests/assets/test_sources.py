"""Datasets and base models as source assets, and what their observations change, on a real instance."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import pytest
from dagster import (
    AssetKey,
    AssetSelection,
    DagsterInstance,
    Definitions,
    RepositoryDefinition,
    build_sensor_context,
    define_asset_job,
    materialize,
)
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest
from PIL import Image

from assets.definitions import build_definitions
from assets.sources import base_model, captioning_models, dataset_keys, source_assets, start_dependency
from pipeline.recipe import Recipe, project_root
from resources.run_worker import MACHINE_TAG
from tests.small_recipe import small_recipe

FLOWERS, FACES = (AssetKey([name, "raw_images"]) for name in ("flowers", "faces"))


@pytest.fixture
def recipes(tmp_path: Path, tiny_sd: Path) -> list[Recipe]:
    """Two recipes that read one folder with one image."""
    (tmp_path / "data").mkdir()
    Image.new("RGB", (64, 48), "red").save(tmp_path / "data" / "rose.png")
    (tmp_path / "data" / "rose.txt").write_text("a rose", encoding="utf-8")
    model = {"base": tiny_sd}
    return [
        small_recipe(tmp_path, name, output_dir=tmp_path / name, model=model, recache={"enabled": True})
        for name in ("flowers", "faces")
    ]


def stale(repository: RepositoryDefinition, instance: DagsterInstance) -> dict[AssetKey, list[str]]:
    """Return the reasons why Dagster's UI shows raw_images of a recipe as unsynced."""
    resolver = CachingStaleStatusResolver(instance, repository.asset_graph, LoadingContextForTest(instance))
    return {
        key: [cause.reason for cause in resolver.get_stale_causes(key)]
        for key in (FLOWERS, FACES)
        if resolver.get_status(key) != StaleStatus.FRESH
    }


def tick(repository: RepositoryDefinition, instance: DagsterInstance, recipe: str, cursor: str | None) -> str:
    """Evaluate a tick of a recipe's sensor, store its observations like the daemon, and return its cursor."""
    sensor = repository.get_sensor_def(f"{recipe}_dataset_changed")
    context = build_sensor_context(
        instance, cursor=cursor, repository_def=repository, sensor_name=sensor.name
    )
    result = sensor.evaluate_tick(context)
    for event in result.asset_events:
        instance.report_runless_asset_event(event)
    assert result.cursor is not None
    return result.cursor


def num_observations(instance: DagsterInstance, key: AssetKey) -> int:
    return len(instance.fetch_observations(key, limit=100).records)


def test_M3_a_changed_file_of_a_shared_folder_makes_both_recipes_unsynced(
    recipes: list[Recipe], instance: DagsterInstance, tmp_path: Path
) -> None:
    repository = build_definitions(recipes).get_repository_def()
    (source,) = dataset_keys(recipes[0])
    assert [source] == dataset_keys(recipes[1])
    for key in (FLOWERS, FACES):
        assert source in repository.asset_graph.get(key).parent_keys

    def scan() -> None:
        selection = AssetSelection.assets(FLOWERS, FACES).without_checks()
        assert materialize(
            [*repository.asset_graph.assets_defs], selection=selection, instance=instance
        ).success

    cursor = tick(repository, instance, "flowers", None)
    scan()
    assert stale(repository, instance) == {}
    cursor = tick(repository, instance, "flowers", cursor)
    tick(repository, instance, "faces", None)
    assert num_observations(instance, source) == 1, "an unchanged folder is observed once, whoever watches it"
    assert stale(repository, instance) == {}

    (tmp_path / "data" / "rose.txt").write_text("a red rose", encoding="utf-8")
    tick(repository, instance, "flowers", cursor)
    reasons = ["has a new dependency data version"]
    assert stale(repository, instance) == {FLOWERS: reasons, FACES: reasons}
    scan()
    assert stale(repository, instance) == {}


def test_observe_in_the_ui_gives_the_version_that_the_sensor_gives(
    recipes: list[Recipe], instance: DagsterInstance, tmp_path: Path
) -> None:
    definitions = build_definitions(recipes)
    repository = definitions.get_repository_def()
    (source,) = dataset_keys(recipes[0])
    tick(repository, instance, "flowers", None)
    job = define_asset_job("observe", AssetSelection.assets(source))
    resolved = job.resolve(asset_graph=repository.asset_graph)
    assert resolved.execute_in_process(instance=instance).success
    observed, expected = instance.fetch_observations(source, limit=2).records
    versions = [each.asset_observation.tags["dagster/data_version"] for each in (observed, expected)]
    assert versions[0] == versions[1]


def test_the_files_of_a_local_base_model_are_observed(tmp_path: Path, instance: DagsterInstance) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}", encoding="utf-8")
    recipe = small_recipe(
        tmp_path,
        model={"base": tmp_path / "base"},
        recache={"enabled": True},
        diagnosis={"captions": True},
    )
    repository = build_definitions([recipe]).get_repository_def()
    for asset in ("vae_latents", "text_embeddings", "diagnosis", "trained_lora"):
        assert base_model(recipe).key in repository.asset_graph.get(AssetKey(["flowers", asset])).parent_keys
    cursor = tick(repository, instance, "flowers", None)
    cursor = tick(repository, instance, "flowers", cursor)
    assert num_observations(instance, base_model(recipe).key) == 1
    (tmp_path / "base" / "config.json").write_text("[]", encoding="utf-8")
    tick(repository, instance, "flowers", cursor)
    assert num_observations(instance, base_model(recipe).key) == 2


def test_a_base_model_that_is_not_on_this_machine_is_a_source_without_observations(
    tmp_path: Path, instance: DagsterInstance
) -> None:
    (tmp_path / "data").mkdir()
    recipe = small_recipe(tmp_path, recache={"enabled": True})
    key = base_model(recipe).key
    assert key == AssetKey(["source_models", "models", "none"])
    tick(build_definitions([recipe]).get_repository_def(), instance, "flowers", None)
    assert num_observations(instance, key) == 0


@pytest.mark.parametrize("name", ["sdxl", "my model"])
def test_a_base_model_on_a_disk_that_is_mounted_later_is_observed_as_the_asset_of_the_graph(
    tmp_path: Path, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    model = tmp_path / "disk" / name
    bases = {"flowers": model, "faces": f"~/disk/{name}"}
    recipes = [
        small_recipe(tmp_path, each, model={"base": base}, recache={"enabled": True})
        for each, base in bases.items()
    ]
    repository = build_definitions(recipes).get_repository_def()
    keys = {base_model(recipe).key for recipe in recipes}
    assert len(keys) == 1, "one folder is one source"

    model.mkdir(parents=True)
    (model / "model_index.json").write_text("{}", encoding="utf-8")
    tick(repository, instance, "flowers", None)
    assert num_observations(instance, *keys) == 1
    assert keys <= repository.asset_graph.get_all_asset_keys()
    assert {base_model(recipe).key for recipe in recipes} == keys


def test_the_key_of_a_folder_of_the_project_does_not_depend_on_whether_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assets.sources.project_root", lambda: tmp_path)
    monkeypatch.setattr("assets.sources.in_project", tmp_path.joinpath)
    names = ("models/sdxl", "./models/sdxl/", "models/my model", "models/my_model", "owner/name")
    recipes = [small_recipe(tmp_path, model={"base": name}) for name in names]
    keys = [base_model(recipe).key for recipe in recipes]
    assert keys[0] == keys[1] == AssetKey(["source_models", "models", "sdxl"])
    assert keys[2] != keys[3]
    assert keys[4] == AssetKey(["source_models", "owner", "name"])
    for name in names:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    assert [base_model(recipe).key for recipe in recipes] == keys


def test_a_captioning_model_is_a_source_of_captions_and_observed(
    tmp_path: Path, instance: DagsterInstance
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "captioner").mkdir()
    (tmp_path / "captioner" / "config.json").write_text("{}", encoding="utf-8")
    captions = {"from": "model", "model": str(tmp_path / "captioner")}
    datasets = [{"name": name, "path": tmp_path / "data", "captions": captions} for name in "ab"]
    recipe = small_recipe(tmp_path, datasets=datasets, recache={"enabled": True})
    repository = build_definitions([recipe]).get_repository_def()
    (model,) = captioning_models(recipe)
    captioned, latents = (AssetKey(["flowers", name]) for name in ("captions", "vae_latents"))
    assert model.key in repository.asset_graph.get(captioned).parent_keys
    assert model.key not in repository.asset_graph.get(latents).parent_keys

    cursor = tick(repository, instance, "flowers", None)
    (tmp_path / "captioner" / "config.json").write_text("[]", encoding="utf-8")
    tick(repository, instance, "flowers", cursor)
    assert num_observations(instance, model.key) == 2


@pytest.mark.parametrize(("kind", "file"), [({}, "config.json"), ({"tagger": {}}, "model.onnx")])
def test_the_version_of_a_captioning_model_of_the_hub_is_the_commit_of_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any], file: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    captions = {"from": "model", "model": "owner/captioner", **kind}
    dataset = {"name": "a", "path": tmp_path / "data", "captions": captions}
    (model,) = captioning_models(small_recipe(tmp_path, datasets=[dataset]))
    assert model.key == AssetKey(["source_models", "owner", "captioner"])
    assert model.version() is None
    repository, commit = tmp_path / "hub" / "models--owner--captioner", "0" * 40
    for folder in ("refs", f"snapshots/{commit}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    (repository / "snapshots" / commit / file).write_text("{}", encoding="utf-8")
    assert model.version() == commit


def test_each_dataset_and_base_model_is_one_source(recipes: list[Recipe]) -> None:
    keys = [key for asset in source_assets(recipes) for key in asset.keys]
    assert sorted(keys) == sorted([*dataset_keys(recipes[0]), base_model(recipes[0]).key])


def test_the_keys_of_sources_are_paths_of_the_project_or_names_with_a_hash(tmp_path: Path) -> None:
    inside = small_recipe(tmp_path, datasets=[{"name": "a", "path": project_root() / "data" / "flowers"}])
    assert dataset_keys(inside) == [AssetKey(["source_datasets", "data", "flowers"])]
    remote = small_recipe(tmp_path, datasets=[{"name": "a", "path": "memory://bucket/flowers"}])
    (key,) = dataset_keys(remote)
    assert key.path[1].startswith("flowers_")
    assert len(key.path[1]) == len("flowers_") + 6
    revision = small_recipe(tmp_path, model={"base": "owner/name", "revision": "v1"})
    (prefix, owner, name) = base_model(revision).key.path
    assert (prefix, owner) == ("source_models", "owner")
    assert re.fullmatch(r"name_v1_[0-9a-f]{6}", name)


@pytest.mark.parametrize(
    "values",
    [
        {"model": {"base": "owner/name", "revision": "refs/pr/1"}},
        {"model": {"base": "models/name@v1"}},
        {"datasets": [{"name": "a", "path": "data/a@b+c"}]},
        {"datasets": [{"name": "a", "path": "memory://bucket/flowers@v1"}]},
        {
            "datasets": [
                {
                    "name": "a",
                    "path": "data/a",
                    "captions": {"from": "model", "model": "owner/captioner", "revision": "v1.0+x"},
                }
            ]
        },
    ],
    ids=str,
)
def test_a_recipe_with_any_revision_and_any_name_of_a_folder_can_be_loaded(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    """Dagster makes names of inputs from keys, when it loads assets that depend on them."""
    Definitions.validate_loadable(build_definitions([small_recipe(tmp_path, **values)]))


def test_names_with_other_characters_have_different_keys(tmp_path: Path) -> None:
    names = ("花", "顔", "my flowers", "my_flowers", "my?flowers")
    keys = [
        key
        for name in names
        for key in dataset_keys(
            small_recipe(tmp_path, datasets=[{"name": "a", "path": project_root() / "data" / name}])
        )
    ]
    assert len(set(keys)) == len(names)
    assert AssetKey(["source_datasets", "data", "my_flowers"]) in keys


def test_two_code_locations_with_one_key_do_not_replace_each_other_s_observations(
    tmp_path: Path, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = dict[Path, Recipe]()
    for name in ("flowers", "faces"):
        root = tmp_path / name
        (root / "data").mkdir(parents=True)
        (root / "data" / f"{name}.txt").write_text(name, encoding="utf-8")
        recipes[root] = small_recipe(root, name, recache={"enabled": True})

    def tick_all(cursors: dict[Path, str | None]) -> dict[Path, str | None]:
        after = dict[Path, str | None]()
        for root, recipe in recipes.items():
            monkeypatch.setattr("assets.sources.project_root", lambda root=root: root)
            repository = build_definitions([recipe]).get_repository_def()
            after[root] = tick(repository, instance, recipe.name, cursors.get(root))
        return after

    key = AssetKey(["source_datasets", "data"])
    cursors = tick_all({})
    assert num_observations(instance, key) == 2
    for _ in range(3):
        cursors = tick_all(cursors)
    assert num_observations(instance, key) == 2

    (tmp_path / "flowers" / "data" / "flowers.txt").write_text("changed", encoding="utf-8")
    tick_all(cursors)
    assert num_observations(instance, key) == 3


def test_a_run_by_the_executor_of_a_component_s_project_has_its_machine(
    recipes: list[Recipe], instance: DagsterInstance
) -> None:
    # `execute_in_process` replaces the executor of the job, as a project replaces the recipes' executor.
    job = build_definitions(recipes).resolve_implicit_global_asset_job_def()
    result = job.execute_in_process(instance=instance, asset_selection=[FLOWERS])
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    assert run.tags[MACHINE_TAG] == platform.node()


def started_from(folder: Path, name: str, origin: str | None) -> Recipe:
    training = (
        {}
        if origin is None
        else {"training": {"lora": {"start_from": folder / origin / "runs" / "a.safetensors"}}}
    )
    return small_recipe(folder, name, output_dir=folder / name, **training)


def test_a_recipe_that_starts_from_the_lora_of_another_depends_on_it(tmp_path: Path) -> None:
    base, later = started_from(tmp_path, "base", None), started_from(tmp_path, "later", "base")
    graph = build_definitions([base, later]).get_repository_def().asset_graph
    assert AssetKey(["base", "trained_lora"]) in graph.get(AssetKey(["later", "trained_lora"])).parent_keys


def test_recipes_that_start_from_each_other_or_themselves_have_no_such_dependency(tmp_path: Path) -> None:
    one, two = started_from(tmp_path, "one", "two"), started_from(tmp_path, "two", "one")
    three = started_from(tmp_path, "three", "three")
    recipes = [
        one,
        two,
        three,
        started_from(tmp_path, "four", "one"),
        started_from(tmp_path, "five", "elsewhere"),
    ]
    assert [start_dependency(each, recipes) for each in recipes] == [
        None,
        None,
        None,
        AssetKey(["one", "trained_lora"]),
        None,
    ]
    assert build_definitions(recipes).get_repository_def().get_job("one_train") is not None
