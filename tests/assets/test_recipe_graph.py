"""A broken recipe is shown with its error, and the other recipes keep their definitions."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from dagster import (
    AssetKey,
    AssetSelection,
    DagsterInstance,
    DefaultScheduleStatus,
    DefaultSensorStatus,
    Definitions,
    ExecuteInProcessResult,
    RepositoryDefinition,
    build_schedule_context,
    build_sensor_context,
    define_asset_job,
)
from PIL import Image

from assets.definitions import build_definitions, load_project_recipes
from assets.location import Location
from assets.recipe_graph import recipe_assets
from assets.sources import SOURCES_GROUP
from pipeline.recipe.check_specs import SPECS
from pipeline.storage.table_columns import OPTIONAL_ASSETS
from resources.run_summary import summarize_run
from tests.small_recipe import small_recipe

FIRST = ("raw_images", "validated_dataset", "aspect_buckets")

GOOD = """\
datasets: [{{name: photos, path: {folder}/data}}]
cache_dir: {folder}/cache
output_dir: {folder}/{name}
model: {{base: owner/name}}
recache: {{enabled: true}}
"""

OPTIONAL_SECTIONS = """\
diagnosis: {}
evaluation: {}
sweep: {grid: {training.learning_rate: [0.0001, 0.001]}, judge: evaluation}
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


def recipe_keys(repository: RepositoryDefinition) -> set[AssetKey]:
    """Return the keys of all assets except datasets and base models."""
    graph = repository.asset_graph
    return {key for key in graph.get_all_asset_keys() if graph.get(key).group_name != SOURCES_GROUP}


def job_names(repository: RepositoryDefinition) -> set[str]:
    return {job.name for job in repository.get_all_jobs() if not job.name.startswith("__")}


def jobs_of(*recipes: str) -> set[str]:
    return {f"{recipe}_{kind}" for recipe in recipes for kind in ("cache", "train")}


def test_O12_one_broken_recipe_of_three_leaves_the_definitions_of_the_others_unchanged(configs: Path) -> None:
    before = load()
    (configs / "bad.yaml").write_text(BROKEN, encoding="utf-8")
    repository = load()
    assert job_names(repository) == {*job_names(before), *jobs_of("bad")}
    for definitions, own in (("schedule_defs", "bad_recache"), ("sensor_defs", "bad_dataset_changed")):
        names = {each.name for each in getattr(repository, definitions)}
        assert names == {own, *(each.name for each in getattr(before, definitions))}
    assets = {AssetKey([recipe, name]) for recipe in ("flowers", "faces", "bad") for name in SPECS}
    assert recipe_keys(repository) == {*assets, AssetKey(["bad", "recipe_error"])}


@pytest.mark.parametrize("name", ["source_datasets", "source_models"])
def test_a_recipe_with_the_prefix_of_source_assets_is_excluded_and_all_others_load(
    configs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A folder raw_images in the project, or a base model of that name, has the key <prefix>/raw_images."""
    monkeypatch.setenv("LATENTLINE_PROJECT", str(tmp_path))
    text = GOOD.format(folder=tmp_path, name=name).replace(f"{tmp_path}/data", "raw_images")
    (configs / f"{name}.yaml").write_text(text.replace("owner/name", "raw_images"), encoding="utf-8")
    flowers = (configs / "flowers.yaml").read_text("utf-8").replace(f"{tmp_path}/data", "raw_images")
    (configs / "flowers.yaml").write_text(flowers.replace("owner/name", "raw_images"), encoding="utf-8")

    repository = load()
    (broken,) = load_project_recipes().broken
    assert broken.error.what.endswith(f"must not be source_datasets or source_models, got {name!r}")
    assert f"{name}.yaml" in broken.error.where
    assert broken.error.fix == f"rename the file, for example to my_{name}.yaml"
    assert jobs_of("flowers", "faces") <= job_names(repository)
    assert AssetKey([f"{name}_2", "recipe_error"]) in recipe_keys(repository)


def test_O15_a_recipe_that_breaks_keeps_its_assets_schedule_and_sensor_without_executing_anything(
    configs: Path,
) -> None:
    file = configs / "faces.yaml"
    text = file.read_text("utf-8").replace("enabled: true", "cron: 30 2 * * *, enabled: true, settle_s: 7")
    file.write_text(text, encoding="utf-8")
    before = load()
    file.write_text(f"{text}cachedir: y\n", encoding="utf-8")
    repository = load()

    for name in SPECS:
        key = AssetKey(["faces", name])
        asset, former = repository.asset_graph.get(key), before.asset_graph.get(key)
        # The sources of a recipe that cannot be read are unknown.
        assert asset.parent_keys == former.parent_keys & recipe_keys(before)
        assert asset.group_name == former.group_name
        assert not asset.is_executable
        assert former.is_executable
    schedule, sensor = (
        repository.get_schedule_def("faces_recache"),
        repository.get_sensor_def("faces_dataset_changed"),
    )
    former_schedule = before.get_schedule_def("faces_recache")
    assert schedule.cron_schedule == former_schedule.cron_schedule == "30 2 * * *"
    assert schedule.default_status == former_schedule.default_status == DefaultScheduleStatus.RUNNING
    former_sensor = before.get_sensor_def("faces_dataset_changed")
    assert sensor.minimum_interval_seconds == former_sensor.minimum_interval_seconds == 7
    assert sensor.default_status == former_sensor.default_status == DefaultSensorStatus.RUNNING

    with DagsterInstance.ephemeral() as instance:
        tick = sensor.evaluate_tick(
            build_sensor_context(instance, cursor="files", repository_def=repository, sensor_name=sensor.name)
        )
        night = datetime(2026, 1, 1, 2, 30, tzinfo=UTC)
        scheduled = schedule.evaluate_tick(build_schedule_context(instance, scheduled_execution_time=night))
    for skipped in (tick, scheduled):
        assert not skipped.run_requests
        assert "recipe faces is excluded: unknown key cachedir" in str(skipped.skip_message)
    assert tick.cursor == "files"


def test_O15_a_recipe_that_breaks_keeps_the_assets_that_only_some_recipes_have(configs: Path) -> None:
    file = configs / "faces.yaml"
    dataset = "/data, validation_fraction: 0.1, captions: {from: model, model: owner/captioner}}]"
    text = file.read_text("utf-8").replace("/data}]", dataset) + OPTIONAL_SECTIONS
    file.write_text(text, encoding="utf-8")
    before = load()
    own_keys = {AssetKey(["faces", name]) for name in (*SPECS, *OPTIONAL_ASSETS)}
    assert recipe_keys(before) >= own_keys
    assert AssetKey(["faces", "recipe_error"]) not in recipe_keys(before)

    file.write_text(f"{text}cachedir: y\n", encoding="utf-8")
    repository = load()
    for key in own_keys:
        asset, former = repository.asset_graph.get(key), before.asset_graph.get(key)
        assert asset.parent_keys == former.parent_keys & own_keys, key


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
    errors = [key for key in recipe_keys(repository) if key.path[-1] == "recipe_error"]
    assert len(errors) == 1


def test_O15_a_copy_of_a_recipe_excludes_only_itself(configs: Path) -> None:
    before = load()
    (configs / "a_copy.yaml").write_text((configs / "faces.yaml").read_text("utf-8"), encoding="utf-8")
    repository = load()
    assert job_names(repository) == {*job_names(before), *jobs_of("a_copy")}
    for key in recipe_keys(before):
        assert repository.asset_graph.get(key).is_executable
    description = repository.asset_graph.get(AssetKey(["a_copy", "recipe_error"])).description
    assert "belongs to recipe faces" in str(description)


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


def test_the_assets_work_under_other_keys(tmp_path: Path, tiny_sd: Path) -> None:
    """Tables, reports and summaries find recipe and asset if a project adds a prefix to the keys."""
    (tmp_path / "data").mkdir()
    for name, width in (("rose", 64), ("lily", 60)):
        Image.radial_gradient("L").resize((width, 48)).save(tmp_path / "data" / f"{name}.png")
        (tmp_path / "data" / f"{name}.txt").write_text(f"a {name}", encoding="utf-8")
    recipe = small_recipe(tmp_path, model={"base": tiny_sd}, buckets={"resolution": 64})
    graph = recipe_assets(recipe, Location("gpu"))
    keys = {key: key.with_prefix("team") for assets in graph for key in assets.keys}
    prefixed = [assets.with_attributes(asset_key_replacements=keys) for assets in graph]
    definitions = Definitions(prefixed, resources=build_definitions([recipe]).resources)
    first = AssetSelection.assets(*(keys[AssetKey(["flowers", name])] for name in FIRST))
    buckets = AssetSelection.assets(keys[AssetKey(["flowers", "aspect_buckets"])])

    def run(selection: AssetSelection) -> ExecuteInProcessResult:
        job = define_asset_job("prefixed", selection)
        resolved = Definitions.merge(definitions, Definitions(jobs=[job])).resolve_job_def("prefixed")
        return resolved.execute_in_process(instance=instance, raise_on_error=False)

    with DagsterInstance.ephemeral() as instance:
        result = run(first)
        [numbers] = summarize_run(instance, result.run_id, [recipe]).numbers
        assert run(buckets).success, "the table before it is read from its file"
        checks = run(buckets - buckets.without_checks())
        (tmp_path / "data" / "rose.txt").unlink()
        closed = summarize_run(instance, run(first).run_id, [recipe]).problems

    materialized = [event.asset_key.path for event in result.get_asset_materialization_events()]
    assert materialized == [["team", "flowers", name] for name in FIRST]
    assert "2 found, 0 rejected, 2 kept" in numbers
    assert not checks.get_asset_materialization_events()
    assert {each.asset_key.path[0] for each in checks.get_asset_check_evaluations()} == {"team"}
    assert "asset team/flowers/validated_dataset" in str(closed[0]), closed
    table = definitions.load_asset_value(keys[AssetKey(["flowers", "aspect_buckets"])])
    assert table.height == 2
