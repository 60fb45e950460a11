"""Recipes that components of a Dagster project name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import RecipeError
from pipeline.recipe.component_files import component_recipe_files
from pipeline.recipe.project import MARKER

ROOT = Path(__file__).resolve().parents[3]

RECIPE = """\
datasets: [{{name: photos, path: {root}/photos}}]
cache_dir: {root}/cache
output_dir: {root}/out
model: {{base: owner/name}}
"""


def component(root: Path, recipe: str) -> Path:
    """Write a project with one component, and return its folder."""
    folder = root / "src" / "project" / "defs" / "flowers"
    folder.mkdir(parents=True)
    text = f"type: latentline.LoraRecipe\nattributes: {{recipe: {recipe}}}\n"
    (folder / "defs.yaml").write_text(f"type: dagster.DefsFolderComponent\n---\n{text}", "utf-8")
    return folder


@pytest.mark.parametrize("recipe", ["flowers.yaml", "'{{ context.project_root }}/other/flowers.yaml'"])
def test_a_recipe_is_next_to_its_defs_yaml_or_named_from_the_root(tmp_path: Path, recipe: str) -> None:
    folder = component(tmp_path, recipe)
    expected = tmp_path / "other" if "other" in recipe else folder
    assert component_recipe_files(tmp_path) == [expected / "flowers.yaml"]


@pytest.mark.parametrize(
    ("recipe", "what"),
    [("'{{ env.RECIPE }}'", "must be a path, got '{{ env.RECIPE }}'"), ("[", "cannot be read")],
)
def test_a_recipe_that_cannot_be_found_is_an_error(tmp_path: Path, recipe: str, what: str) -> None:
    folder = component(tmp_path, recipe)
    with pytest.raises(RecipeError, match=what) as raised:
        component_recipe_files(tmp_path)
    assert raised.value.where == str(folder / "defs.yaml")


def test_gc_examines_the_cache_of_a_recipe_next_to_its_defs_yaml(tmp_path: Path) -> None:
    """With --keep 0d, it would otherwise delete the entries that the recipe needs."""
    folder = component(tmp_path, "flowers.yaml")
    (tmp_path / MARKER).touch()
    (tmp_path / "cache").mkdir()
    (folder / "flowers.yaml").write_text(RECIPE.format(root=tmp_path), encoding="utf-8")
    removed = ("LATENTLINE_PROJECT", "LATENTLINE_CONFIGS")
    variables = {name: value for name, value in os.environ.items() if name not in removed}
    command = [sys.executable, "-m", "latentline", "gc", "--keep", "0d"]
    environment = {**variables, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(f"{tmp_path / 'cache'}: 0 entries")
