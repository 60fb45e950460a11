"""The component `latentline.LoraRecipe` in projects of Dagster, loaded in this process and by `dg`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import click
import pytest
from dagster import (
    AssetKey,
    DagsterInstance,
    Definitions,
    FilesystemIOManager,
    ResourceDefinition,
    asset,
    define_asset_job,
    json_console_logger,
    multiprocess_executor,
    sensor,
)
from dagster.components.testing import DefsFolderSandbox, create_defs_folder_sandbox

from assets.definitions import build_definitions, load_project_recipes
from latentline import LoraRecipe
from pipeline.errors import RecipeError

# Dagster loads defs.yaml with a function that Pydantic wants to remove, and links to it with beta classes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.parse_obj_as. is deprecated"),
    pytest.mark.filterwarnings("ignore::dagster.BetaWarning"),
]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[DefsFolderSandbox]:
    with create_defs_folder_sandbox() as sandbox:
        monkeypatch.setenv("LATENTLINE_CONFIGS", str(sandbox.project_root / "configs"))
        # The tests' process has found its project folder long before.
        monkeypatch.setenv("LATENTLINE_PROJECT", str(ROOT))
        yield sandbox


def names(defs: Definitions) -> dict[str, list[str]]:
    """Return the sorted names of all definitions, each as often as it is defined."""
    repository = defs.get_repository_def()
    graph = repository.asset_graph
    return {
        "assets": sorted(key.to_user_string() for key in graph.get_all_asset_keys()),
        "checks": sorted(str(key) for key in graph.asset_check_keys),
        "jobs": sorted(job.name for job in repository.get_all_jobs()),
        "schedules": sorted(each.name for each in repository.schedule_defs),
        "sensors": sorted(each.name for each in repository.sensor_defs),
        "resources": sorted(repository.get_top_level_resources()),
    }


def test_two_scaffolded_recipes_define_what_the_folder_of_recipes_does(
    project: DefsFolderSandbox, photos_once: Path
) -> None:
    for name in ("flowers", "roses"):
        folder = project.scaffold_component(LoraRecipe, name, {"images": str(photos_once), "steps": 7})
        line = "recipe: '{{ context.project_root }}/configs/" + f"{name}.yaml'"
        assert line in (folder / "defs.yaml").read_text("utf-8")
    assert (project.project_root / ".latentline-project").is_file()
    recipes, broken = load_project_recipes()
    assert [(recipe.name, recipe.training.steps) for recipe in recipes] == [("flowers", 7), ("roses", 7)]

    with project.build_all_defs() as defs:
        merged = names(defs)
    expected = names(build_definitions(recipes, broken))
    # Names that recipes do not need for themselves would collide with those of the project.
    expected["resources"] = ["latentline_launcher", "latentline_tables"]
    expected["sensors"] = sorted(expected["sensors"] + ["latentline_dead_runs"])
    expected["sensors"].remove("dead_runs")
    assert merged == expected
    assert {"flowers_train", "roses_train"} <= set(merged["jobs"])


def test_definitions_of_the_project_keep_their_executor_loggers_resources_and_names(
    project: DefsFolderSandbox, photos_once: Path
) -> None:
    folder = project.scaffold_component(LoraRecipe, "flowers", {"images": str(photos_once)})

    @sensor(name="dead_runs", target="*")
    def own_sensor() -> None: ...

    @asset(required_resource_keys={"tables", "launcher"})
    def sales() -> None: ...

    foreign = Definitions(
        assets=[sales],
        jobs=[define_asset_job("sales_job", "sales")],
        sensors=[own_sensor],
        executor=multiprocess_executor,
        loggers={"console": json_console_logger},
        resources={"tables": FilesystemIOManager(), "launcher": ResourceDefinition.none_resource()},
    )
    with project.load_component_and_build_defs(folder) as (_, own):
        defs = Definitions.merge(foreign, own)
    other, recipes = defs.resolve_job_def("sales_job"), defs.resolve_job_def("flowers_cache")
    assert (other.executor_def, recipes.executor_def.name) == (multiprocess_executor, "in_process")
    assert other.loggers == {"console": json_console_logger}
    assert recipes.run_config == {}
    with DagsterInstance.ephemeral() as instance:
        key = AssetKey(["flowers", "raw_images"])
        assert recipes.execute_in_process(instance=instance, asset_selection=[key]).success
        assert defs.load_asset_value(key, instance=instance).height > 0


def test_a_broken_recipe_shows_its_error_and_the_other_one_stays(
    project: DefsFolderSandbox, photos_once: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flowers", "roses"):
        project.scaffold_component(LoraRecipe, name, {"images": str(photos_once)})
    (project.project_root / "configs" / "flowers.yaml").write_text("bogus: 1\n", "utf-8")
    with project.build_all_defs() as defs:
        assert {"flowers/recipe_error", "roses/trained_lora"} <= set(names(defs)["assets"])

    monkeypatch.setenv("LATENTLINE_STRICT", "1")
    with pytest.raises(Exception, match="flowers") as raised, project.build_all_defs():
        pass
    assert "bogus" in str(raised.value.__cause__)


def test_definitions_that_a_process_builds_again_follow_the_recipe(
    project: DefsFolderSandbox, photos_once: Path
) -> None:
    project.scaffold_component(LoraRecipe, "flowers", {"images": str(photos_once)})
    file = project.project_root / "configs" / "flowers.yaml"
    with project.build_all_defs() as defs:
        assert names(defs)["schedules"] == ["flowers_recache"]
    file.write_text(f"{file.read_text('utf-8')}recache: {{cron: null}}\n", encoding="utf-8")
    with project.build_all_defs() as defs:
        assert names(defs)["schedules"] == []


def build_python_component(
    project: DefsFolderSandbox, recipe: str, annotation: str, first_line: str = ""
) -> RecipeError | dict[str, list[str]]:
    """Declare a component in Python, and return all names of the project or the error of the component."""
    code = f"""
        {first_line}
        from pathlib import Path
        import dagster as dg
        from latentline import LoraRecipe

        @dg.component_instance
        def component(context: dg.ComponentLoadContext){annotation}:
            return LoraRecipe(recipe={recipe})
        """
    (project.defs_folder_path / "component.py").write_text(dedent(code), encoding="utf-8")
    try:
        with project.build_all_defs() as defs:
            return names(defs)
    except Exception as err:
        if isinstance(err.__cause__, RecipeError):
            return err.__cause__
        raise


# Dagster calls its loading of modules with components a preview.
@pytest.mark.filterwarnings("ignore::dagster.PreviewWarning")
def test_a_component_in_python_needs_its_class_as_the_annotation_and_an_absolute_path(
    project: DefsFolderSandbox, photos_once: Path
) -> None:
    shutil.rmtree(project.scaffold_component(LoraRecipe, "flowers", {"images": str(photos_once)}))
    file, annotation = 'context.project_root / "configs/flowers.yaml"', " -> LoraRecipe"
    built = build_python_component(project, file, annotation)
    assert isinstance(built, dict)
    assert "flowers_train" in built["jobs"]

    # Dagster lists the components of a type without loading the others, so it reads only annotations.
    future = "from __future__ import annotations"
    for error in (
        build_python_component(project, file, ""),
        build_python_component(project, file, annotation, future),
    ):
        assert isinstance(error, RecipeError)
        assert error.where == str(project.project_root / "configs" / "flowers.yaml")
        assert "`-> latentline.LoraRecipe`" in error.fix
        assert future in error.fix

    error = build_python_component(project, 'Path("configs/flowers.yaml")', annotation)
    assert isinstance(error, RecipeError)
    assert error.what.endswith("must be an absolute path, got configs/flowers.yaml")
    assert file in error.fix


def test_one_component_loads_alone(project: DefsFolderSandbox, photos_once: Path) -> None:
    for name in ("flowers", "roses"):
        folder = project.scaffold_component(LoraRecipe, name, {"images": str(photos_once)})
    with project.load_component_and_build_defs(folder) as (component, defs):
        assert isinstance(component, LoraRecipe)
        assert {"roses_cache", "roses_train"} <= set(names(defs)["jobs"])
        assert "flowers_train" not in names(defs)["jobs"]


def test_copies_of_a_recipe_next_to_their_defs_yaml_need_another_name_and_output_folder(
    project: DefsFolderSandbox, photos_once: Path
) -> None:
    folder = project.scaffold_component(LoraRecipe, "flowers", {"images": str(photos_once)})
    original = project.project_root / "configs" / "flowers.yaml"
    copies = project.defs_folder_path / "copies"
    shutil.copytree(folder, copies)
    (copies / "defs.yaml").write_text("type: latentline.LoraRecipe\nattributes: {recipe: flowers.yaml}\n")
    shutil.copy(original, copies / "flowers.yaml")
    with pytest.raises(Exception, match="building definitions") as raised, project.build_all_defs():
        pass
    error = str(raised.value.__cause__)
    assert error.startswith("2 components have a recipe named flowers\n")
    assert str(copies / "flowers.yaml") in error

    (copies / "defs.yaml").write_text("type: latentline.LoraRecipe\nattributes: {recipe: other.yaml}\n")
    (copies / "flowers.yaml").rename(copies / "other.yaml")
    with project.build_all_defs() as defs:
        assert {"flowers/trained_lora", "other/recipe_error"} <= set(names(defs)["assets"])


def test_a_scaffold_that_fails_can_be_repeated(project: DefsFolderSandbox, tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match="contains no images"):
        project.scaffold_component(LoraRecipe, "flowers", {"images": str(tmp_path)})
    assert not (project.defs_folder_path / "flowers").exists()


def test_the_package_names_the_component_without_importing_dagster() -> None:
    code = "import sys, latentline; print(dir(latentline), 'dagster' in sys.modules)"
    command = [sys.executable, "-c", code]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert completed.stdout == "['LoraRecipe', '__version__'] False\n"


TWO_PROJECTS = """
import json, shutil, sys, warnings
from dagster.components.testing import create_defs_folder_sandbox as sandbox
from latentline import LoraRecipe
from pipeline.recipe import project_root

warnings.simplefilter("ignore")
options, errors = {"images": sys.argv[1]}, []
with sandbox() as first, sandbox() as second:
    first.scaffold_component(LoraRecipe, "flowers", options)
    try:
        second.scaffold_component(LoraRecipe, "roses", options)
    except Exception as err:
        errors.append(str(err))
    shutil.copytree(first.project_root / "configs", second.project_root / "configs")
    shutil.copytree(first.defs_folder_path, second.defs_folder_path, dirs_exist_ok=True)
    for project in (first, second, first):
        try:
            with project.build_all_defs() as defs:
                defs.resolve_job_def("flowers_train")
        except Exception as err:
            errors.append(str(err.__cause__))
    roots = [str(each.project_root) for each in (first, second)]
    files = sorted(each.name for each in (first.project_root / "configs").iterdir())
    print(json.dumps([roots, str(project_root()), files, errors]))
"""


def test_a_process_uses_the_folder_of_its_project_and_refuses_a_second_one(
    tmp_path: Path, photos_once: Path
) -> None:
    """Relative paths of all recipes in a process start at one folder: both would write into the first."""
    removed = ("LATENTLINE_PROJECT", "LATENTLINE_CONFIGS")
    variables = {name: value for name, value in os.environ.items() if name not in removed}
    completed = subprocess.run(
        [sys.executable, "-c", TWO_PROJECTS, str(photos_once)],
        cwd=tmp_path,
        env={**variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    (first, second), used, files, errors = json.loads(completed.stdout.splitlines()[-1])
    assert (used, files) == (first, ["flowers.yaml"])
    what = f"this process already reads the recipes of another project folder: {first}\n"
    assert [error.startswith(f"{what}  where: {second}\n") for error in errors] == [True, True], errors
    assert "a code location of its own" in errors[0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_dg_scaffolds_checks_lists_and_launches_two_recipes(tmp_path: Path, photos_once: Path) -> None:
    package = tmp_path / "src" / "my_project"
    (package / "defs").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "defs" / "__init__.py").touch()
    (package / "definitions.py").write_text(
        dedent("""\
        from pathlib import Path

        import dagster as dg


        @dg.definitions
        def defs():
            return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
        """)
    )
    (tmp_path / "pyproject.toml").write_text(
        dedent("""\
        [project]
        name = "my_project"
        version = "0.1.0"

        [tool.dg]
        directory_type = "project"

        [tool.dg.project]
        root_module = "my_project"

        [tool.dg.cli]
        suppress_warnings = ["project_and_activated_venv_mismatch"]

        [tool.dg.cli.telemetry]
        enabled = false
        """)
    )
    shutil.copytree(photos_once, tmp_path / "data" / "flowers")
    shutil.copytree(photos_once, tmp_path / "data" / "roses")

    def dg(*arguments: str | Path) -> str:
        command = (Path(sys.executable).parent / "dg", *arguments)
        removed = ("LATENTLINE_PROJECT", "LATENTLINE_CONFIGS", "DAGSTER_HOME")
        variables = {name: value for name, value in os.environ.items() if name not in removed}
        variables |= {"PYTHONPATH": str(tmp_path / "src")}
        completed = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return completed.stdout

    assert "latentline.LoraRecipe" in dg("list", "components")
    options = ("--base", ROOT / "demo" / "base", "--steps", "2", "--resolution", "64")
    for name in ("flowers", "roses"):
        dg("scaffold", "defs", "latentline.LoraRecipe", name, *options)
    dg("check", "yaml")
    dg("check", "defs")
    listed = json.loads(dg("list", "defs", "--json"))
    sources = {each["asset_key"]: each["source"] for each in listed["assets"]}
    # The recipe's own line, as without the component.
    assert sources["roses/trained_lora"].startswith("configs/roses.yaml:")

    dg("launch", "--job", "roses_train")
    assert list((tmp_path / "outputs" / "roses" / "lora").glob("*.safetensors"))
    assert not (tmp_path / "outputs" / "flowers").exists()
