"""A broken recipe is shown with its error, and the other recipes keep their definitions."""

from __future__ import annotations

from pathlib import Path

import pytest
from dagster import AssetKey, DagsterInstance, RepositoryDefinition, build_sensor_context

from assets.definitions import build_definitions, load_project_recipes
from pipeline.recipe.check_specs import SPECS

GOOD = """\
datasets: [{{name: photos, path: {folder}/data}}]
cache_dir: {folder}/cache
output_dir: {folder}/{name}
model: {{base: owner/name}}
"""

BROKEN = "datasets: [\n"


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "configs"
    folder.mkdir()
    (tmp_path / "data").mkdir()
    for name in ("flowers", "faces"):
        (folder / f"{name}.yaml").write_text(GOOD.format(folder=tmp_path, name=name), "utf-8")
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(folder))
    return folder


def load() -> RepositoryDefinition:
    return build_definitions(*load_project_recipes()).get_repository_def()


def job_names(repository: RepositoryDefinition) -> set[str]:
    return {job.name for job in repository.get_all_jobs() if not job.name.startswith("__")}


def jobs_of(*recipes: str) -> set[str]:
    return {f"{recipe}_{kind}" for recipe in recipes for kind in ("cache", "train")}


def test_O12_one_broken_recipe_of_three_leaves_the_definitions_of_the_others_unchanged(configs: Path) -> None:
    before = load()
    (configs / "bad.yaml").write_text(BROKEN, encoding="utf-8")
    repository = load()
    assert job_names(repository) == {*job_names(before), *jobs_of("bad")}
    for definitions in ("schedule_defs", "sensor_defs"):
        names = [each.name for each in getattr(repository, definitions)]
        assert names == [each.name for each in getattr(before, definitions)]
    assets = {AssetKey([recipe, name]) for recipe in ("flowers", "faces") for name in SPECS}
    assert repository.asset_graph.get_all_asset_keys() == {*assets, AssetKey(["bad", "recipe_error"])}


def test_the_error_is_the_description_of_an_external_asset(configs: Path) -> None:
    (configs / "bad.yaml").write_text(BROKEN, encoding="utf-8")
    asset = load().asset_graph.get(AssetKey(["bad", "recipe_error"]))
    assert asset.is_external
    assert asset.group_name == "bad"
    assert f"{configs}/bad.yaml:" in str(asset.description)
    assert "fix:" in str(asset.description)


def test_both_jobs_of_a_broken_recipe_fail_with_its_error(configs: Path) -> None:
    (configs / "bad.yaml").write_text(BROKEN, encoding="utf-8")
    repository = load()
    for kind in ("cache", "train"):
        result = repository.get_job(f"bad_{kind}").execute_in_process(raise_on_error=False)
        assert not result.success
        [failure] = result.get_step_failure_events()
        assert failure.step_failure_data.user_failure_data is not None
        assert str(failure.step_failure_data.user_failure_data.description).startswith("RecipeError: ")


def test_sensor_and_schedule_of_the_others_are_evaluated(configs: Path) -> None:
    (configs / "bad.yaml").write_text(BROKEN, encoding="utf-8")
    repository = load()
    sensor = repository.get_sensor_def("flowers_dataset_changed")
    with DagsterInstance.ephemeral() as instance:
        context = build_sensor_context(instance, repository_def=repository, sensor_name=sensor.name)
        tick = sensor.evaluate_tick(context)
    assert "waiting until they settle" in str(tick.skip_message)
    assert repository.get_schedule_def("flowers_recache").job_name == "flowers_cache"


@pytest.mark.parametrize("name", ["my-flowers.yaml", "große Blumen.yaml", "flowers.yml"])
def test_a_file_whose_name_is_no_recipe_name_excludes_only_itself(configs: Path, name: str) -> None:
    text = (configs / "flowers.yaml").read_text("utf-8")
    (configs / name).write_text(text.replace("/flowers", "/other"), encoding="utf-8")
    repository = load()
    assert job_names(repository) > jobs_of("flowers", "faces")
    errors = [key for key in repository.asset_graph.get_all_asset_keys() if key.path[-1] == "recipe_error"]
    assert len(errors) == 1


def test_two_recipes_with_one_output_folder_are_both_excluded(configs: Path) -> None:
    (configs / "roses.yaml").write_text((configs / "faces.yaml").read_text("utf-8"), encoding="utf-8")
    repository = load()
    keys = repository.asset_graph.get_all_asset_keys()
    assert keys == {
        *(AssetKey(["flowers", name]) for name in SPECS),
        AssetKey(["faces", "recipe_error"]),
        AssetKey(["roses", "recipe_error"]),
    }
    for name, other in (("faces", "roses"), ("roses", "faces")):
        description = repository.asset_graph.get(AssetKey([name, "recipe_error"])).description
        assert f"recipe {other} has the same output_dir" in str(description)


def test_bucket_edges_that_the_model_cannot_divide_exclude_only_their_recipe(
    configs: Path, tiny_sd: Path
) -> None:
    file = configs / "faces.yaml"
    text = file.read_text("utf-8").replace("owner/name", str(tiny_sd))
    file.write_text(f"{text}buckets: {{resolution: 60, step: 4}}\n", encoding="utf-8")
    recipes, broken = load_project_recipes()
    assert [recipe.name for recipe in recipes] == ["flowers"]
    assert "buckets.step must be a multiple of" in str(broken[0].error)


def test_definitions_load_if_every_recipe_is_broken(configs: Path) -> None:
    for name in ("flowers", "faces"):
        (configs / f"{name}.yaml").write_text(BROKEN, encoding="utf-8")
    assert job_names(load()) == jobs_of("flowers", "faces")
