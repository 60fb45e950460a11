"""From YAML files to recipes: every mistake of every file in one error, each with its file and line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.errors import RecipeError
from pipeline.recipe.locate import Document, parse
from pipeline.recipe.mistakes import Mistake, PlacedMistake, find_mistakes, recipe_error
from pipeline.recipe.schema import NAME_PATTERN, Recipe
from pipeline.storage.addresses import absolute

CONFIGS_VARIABLE = "LATENTLINE_CONFIGS"
"""Environment variable that names another folder of recipes than configs/."""


@cache
def project_root() -> Path:
    """The folder that holds pipeline/; what relative paths in a recipe start from."""
    return Path(__file__).resolve().parents[2]


def in_project(text: str) -> Path:
    """The place that a recipe's text stands for: relative ones start at the project root, `~` is the home."""
    return project_root() / Path(text).expanduser()


def path_in_recipe(place: Path) -> str:
    """The place as a recipe names it: from the project root where it lies below, whole otherwise.

    Args:
        place: Relative ones start at the working directory; links are kept.
    """
    whole, root = place.expanduser().absolute(), project_root()
    return whole.relative_to(root).as_posix() if whole.is_relative_to(root) else str(whole)


def recipes_dir() -> Path:
    """The folder of recipes: `LATENTLINE_CONFIGS` (relative to the working directory), or configs/."""
    chosen = os.environ.get(CONFIGS_VARIABLE, "")
    return Path(chosen).expanduser().absolute() if chosen else project_root() / "configs"


def load_recipe(file: Path) -> Recipe:
    """The recipe in `file`.

    Raises:
        RecipeError: The file cannot be used; its text lists every mistake with line, key, value and fix.
    """
    recipe, mistakes = _read(Path(file).expanduser().absolute())
    if recipe is None:
        raise recipe_error(mistakes)
    return recipe


def load_recipes(folder: Path | None = None) -> list[Recipe]:
    """The recipes of every *.yaml file directly in `folder`, by name; empty when there is none.

    Names that begin with a dot are passed over: editors and macOS leave such files.

    Args:
        folder: Otherwise `recipes_dir()`.

    Raises:
        RecipeError: The folder is not there, or a recipe cannot be used; lists the mistakes of all.
    """
    folder = recipes_dir() if folder is None else Path(folder).absolute()
    if not folder.is_dir():
        fix = f"create it, or let {CONFIGS_VARIABLE} name the folder of your recipes"
        raise RecipeError("the folder of recipes is not there", where=str(folder), fix=fix)
    recipes: list[Recipe] = []
    mistakes: list[PlacedMistake] = []
    for file in sorted(folder.iterdir()):
        if file.name.startswith(".") or file.suffix not in {".yaml", ".yml"}:
            continue
        recipe, found = _read(file)
        mistakes += found
        recipes += [recipe] if recipe is not None else []
    mistakes += _shared_outputs(recipes)
    if mistakes:
        raise recipe_error(mistakes)
    return sorted(recipes, key=lambda recipe: recipe.name)


def require_own_output(recipe: Recipe) -> None:
    """Nothing, where no other recipe in the folder of the recipe's file has its output folder.

    Others that cannot be used are passed over.

    Raises:
        RecipeError: Names the other recipe.
    """
    files = (file for file in sorted(recipe.source.parent.glob("*.yaml")) if file != recipe.source)
    others = (_read(file)[0] for file in files if not file.name.startswith("."))
    mistakes = _shared_outputs([*(other for other in others if other is not None), recipe])
    if of_this := [each for each in mistakes if each.file == path_in_recipe(recipe.source)]:
        raise recipe_error(of_this)


def recipe_from_mapping(name: str, values: Mapping[str, Any], *, source: Path | None = None) -> Recipe:
    """The recipe `name` of `values`, checked as a file's would be; paths may be `Path` objects.

    Args:
        name: What a file's stem would be.
        values: As the YAML file has them, `{"datasets": [{"name": ...}], ...}`.
        source: What the recipe says its file is; otherwise `<name>.yaml` in the folder of recipes.

    Raises:
        RecipeError: Lists every mistake, by key.
    """
    document = Document(data=json.loads(json.dumps(values, default=os.fspath)))
    source = recipes_dir() / f"{name}.yaml" if source is None else source
    mistakes = [*_name_mistakes(name), *find_mistakes(document.data)]
    if mistakes:
        raise recipe_error([PlacedMistake(f"recipe {name}", mistake) for mistake in mistakes])
    return _recipe(document.data, name=name, source=source)


def placed(recipe: Recipe, mistake: Mistake) -> PlacedMistake:
    """A mistake that was found in a recipe as a whole, with its line in the recipe's file if there is one."""
    line = None
    if recipe.source.is_file():
        line = parse(recipe.source.read_text(encoding="utf-8")).line(mistake.path)
    return PlacedMistake(path_in_recipe(recipe.source), mistake, line)


def _read(file: Path) -> tuple[Recipe | None, list[PlacedMistake]]:
    """The recipe in `file`, or all that is wrong with it."""
    shown = path_in_recipe(file)
    if file.suffix == ".yml":
        what = f"{file.name} would be passed over: recipes end in .yaml"
        return None, [_whole(file, what, f"rename it to {file.stem}.yaml")]
    stem = [PlacedMistake(shown, mistake) for mistake in _name_mistakes(file.stem)]
    try:
        text = file.read_bytes().decode("utf-8")
    except OSError as error:
        what = f"the recipe cannot be read: {error.strerror or error}"
        return None, [*stem, _whole(file, what, "name a readable file")]
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        what = f"the recipe is not UTF-8: byte {error.object[error.start]:#04x} cannot stand there"
        return None, [*stem, PlacedMistake(shown, Mistake((), what, "save the file as UTF-8"), line)]
    document = parse(text)
    mistakes = stem + _document_mistakes(document, shown)
    if mistakes:
        return None, mistakes
    return _recipe(document.data, name=file.stem, source=file), []


def _document_mistakes(document: Document, shown: str) -> list[PlacedMistake]:
    """The document's flaws, and what is wrong with the values in it, by line."""
    flaws = document.flaws
    placed = [PlacedMistake(shown, Mistake(flaw.path, flaw.what, flaw.fix), flaw.line) for flaw in flaws]
    found: list[Mistake] = []
    if isinstance(document.data, dict):
        found = find_mistakes(document.data)
    elif document.data is not None:
        found = [Mistake((), "the recipe is no mapping of keys", "begin with datasets: at the top")]
    elif not flaws:
        found = [Mistake((), "the recipe is empty", "start from a recipe of configs/, such as demo.yaml")]
    flawed = {flaw.path for flaw in flaws}
    placed += [
        PlacedMistake(shown, mistake, document.line(mistake.path))
        for mistake in found
        if mistake.path not in flawed
    ]
    return sorted(placed, key=lambda one: one.line or 0)


def _whole(file: Path, what: str, fix: str) -> PlacedMistake:
    return PlacedMistake(path_in_recipe(file), Mistake((), what, fix))


def _name_mistakes(name: str) -> list[Mistake]:
    if re.fullmatch(NAME_PATTERN, name):
        return []
    better = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_") or "flowers"
    what = f"the recipe's name is {name!r}, and may hold only letters, digits and _"
    return [Mistake((), what, f"rename the file, for example to {better}.yaml")]


def _shared_outputs(recipes: list[Recipe]) -> list[PlacedMistake]:
    """Recipes whose output folder is an earlier one's: each would overwrite the other's tables and LoRA."""
    first: dict[str, Recipe] = {}
    mistakes: list[PlacedMistake] = []
    for recipe in recipes:
        earlier = first.setdefault(os.path.realpath(recipe.output_dir), recipe)
        if earlier is not recipe:
            what = f"output_dir is also the output_dir of recipe {earlier.name}: {recipe.output_dir}"
            fix = f"use a folder of its own, such as outputs/{recipe.name}"
            mistakes.append(placed(recipe, Mistake(("output_dir",), what, fix)))
    return mistakes


def _recipe(data: dict[str, Any], *, name: str, source: Path) -> Recipe:
    """The recipe of checked `data`, its paths joined to the project root."""
    values = json.loads(json.dumps(data))
    root = project_root()
    values.setdefault("cache_dir", str(Recipe.model_fields["cache_dir"].default))
    lora = values.get("training", {}).get("lora", {})
    for holder, key in [
        (values, "cache_dir"),
        (values, "output_dir"),
        *((d, "path") for d in values["datasets"]),
        *((lora, "start_from") for _ in [0] if lora.get("start_from") is not None),
        *((d, "images") for d in values["datasets"] if d.get("images") is not None),
    ]:
        holder[key] = str(absolute(holder[key], root))
    return Recipe.model_validate_json(json.dumps({**values, "name": name, "source": str(source)}))
