"""Loading of recipes: all mistakes of a file in one error, each with its line; other recipes stay usable."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import RecipeError
from pipeline.recipe.datasets import side_input_sections
from pipeline.recipe.deployment import scratch_folder
from pipeline.recipe.errors import RECIPE, Mistake, PlacedMistake, find_mistakes, recipe_error
from pipeline.recipe.project import path_in_recipe, project_root
from pipeline.recipe.schema import NAME_PATTERN, Recipe, valid_name
from pipeline.recipe.untrusted import is_untrusted, link_mistake, untrusted_mistakes
from pipeline.recipe.yaml_document import Document, parse
from pipeline.recipe.yaml_file import read_yaml_file
from pipeline.storage.addresses import Address, Url, absolute, address, address_hash

CONFIGS_VARIABLE = "LATENTLINE_CONFIGS"
"""Environment variable with the folder of recipes; the default is configs/."""


def recipes_dir() -> Path:
    """Return the folder of recipes: `LATENTLINE_CONFIGS` (relative to the working directory), or configs/."""
    chosen = os.environ.get(CONFIGS_VARIABLE, "")
    return Path(chosen).expanduser().absolute() if chosen else project_root() / "configs"


def load_recipe(file: Path) -> Recipe:
    """Return the recipe in `file`; all mistakes are in one RecipeError, with line, key and fix."""
    recipe, mistakes = _read(Path(file).expanduser().absolute())
    if recipe is None:
        raise recipe_error(mistakes)
    return recipe


@dataclass(frozen=True)
class BrokenRecipe:
    """A recipe that cannot be used; its name, the stem of the file, may contain any character."""

    name: str
    file: Path
    error: RecipeError

    def summary(self) -> str:
        """Return one line with the mistake, or the number of mistakes, and a command that prints the fix."""
        what, place = self.error.what.splitlines()[0], self.error.where.splitlines()[0]
        mistake = what if what.endswith(place) else f"{what} ({place})"
        command = f"latentline validate {shlex.quote(path_in_recipe(self.file))}"
        return f"recipe {self.name} is excluded: {mistake}; {command} shows the fix"


class RecipeFolder(NamedTuple):
    """The recipes of a folder, each list sorted by name."""

    recipes: list[Recipe]
    broken: list[BrokenRecipe]


def load_recipe_folder(folder: Path | None = None) -> RecipeFolder:
    """Return the recipes of all *.yaml files directly in `folder`, by default `recipes_dir()`.

    Recipes with mistakes are returned separately. Recipes that share an output folder are all broken.

    Raises:
        RecipeError: The folder does not exist.
    """
    folder = recipes_dir() if folder is None else Path(folder).absolute()
    if not folder.is_dir():
        fix = f"create it, or set {CONFIGS_VARIABLE} to the folder of your recipes"
        raise RecipeError("the folder of recipes does not exist", where=str(folder), fix=fix)

    recipes: list[Recipe] = []
    mistakes: dict[Path, list[PlacedMistake]] = {}
    for file in sorted(folder.iterdir()):
        # Editors and macOS create hidden files.
        if file.name.startswith(".") or file.suffix not in {".yaml", ".yml"}:
            continue
        recipe, file_mistakes = _read(file)
        if recipe is None:
            mistakes[file] = file_mistakes
        else:
            recipes.append(recipe)

    mistakes |= _shared_outputs(recipes)
    broken = [BrokenRecipe(file.stem, file, recipe_error(each)) for file, each in mistakes.items()]
    usable = [recipe for recipe in recipes if recipe.source not in mistakes]
    return RecipeFolder(
        sorted(usable, key=lambda recipe: recipe.name), sorted(broken, key=lambda each: each.name)
    )


def require_own_output(recipe: Recipe) -> None:
    """Raise RecipeError if another valid recipe in the same folder has the same output folder."""
    files = (file for file in sorted(recipe.source.parent.glob("*.yaml")) if file != recipe.source)
    others = (_read(file)[0] for file in files if not file.name.startswith("."))
    mistakes = _shared_outputs([*(other for other in others if other is not None), recipe])
    if recipe.source in mistakes:
        raise recipe_error(mistakes[recipe.source])


def recipe_from_mapping(name: str, values: Mapping[str, Any], *, source: Path | None = None) -> Recipe:
    """Return the recipe `name` with the given values, validated like a file.

    Args:
        name: The recipe's name.
        values: Content of the YAML file, `{"datasets": [{"name": ...}], ...}`; paths may be `Path` objects.
        source: The recipe's `source`; `<name>.yaml` in the folder of recipes by default.
    """
    # As plain data, like a file's: paths become text.
    document = Document(data=json.loads(json.dumps(values, default=os.fspath)))
    source = recipes_dir() / f"{name}.yaml" if source is None else source
    mistakes = [*_name_mistakes(name), *find_mistakes(document.data)]
    if mistakes:
        raise recipe_error([PlacedMistake(f"recipe {name}", mistake) for mistake in mistakes])
    return _recipe(document.data, name=name, source=source)


def placed(recipe: Recipe, mistake: Mistake) -> PlacedMistake:
    """Return a mistake in a loaded recipe with its file, and its line if the file still exists."""
    # A loaded recipe has no lines, so its file is read again.
    line = None
    if recipe.source.is_file():
        line = parse(recipe.source.read_text(encoding="utf-8")).line(mistake.path)
    return PlacedMistake(path_in_recipe(recipe.source), mistake, line)


def _read(file: Path) -> tuple[Recipe | None, list[PlacedMistake]]:
    shown = path_in_recipe(file)
    if file.suffix == ".yml":
        what = f"the suffix of a recipe must be .yaml, got {file.name}"
        return None, [PlacedMistake(shown, Mistake((), what, f"rename it to {file.stem}.yaml"))]

    if is_untrusted() and (link := link_mistake(file, file.parent)) is not None:
        return None, [PlacedMistake(shown, link)]

    document, file_mistakes = read_yaml_file(file, RECIPE)
    mistakes = [*(PlacedMistake(shown, mistake) for mistake in _name_mistakes(file.stem)), *file_mistakes]
    if not mistakes and is_untrusted():
        untrusted = untrusted_mistakes(document.data, project_root())
        mistakes = [PlacedMistake(shown, each, document.line(each.path)) for each in untrusted]
    if mistakes:
        return None, mistakes
    return _recipe(document.data, name=file.stem, source=file), []


def _name_mistakes(name: str) -> list[Mistake]:
    if re.fullmatch(NAME_PATTERN, name):
        return []
    what = f"the name of a recipe must contain only letters, digits and _, got {name!r}"
    return [Mistake((), what, f"rename the file, for example to {valid_name(name)}.yaml")]


def _shared_outputs(recipes: list[Recipe]) -> dict[Path, list[PlacedMistake]]:
    # Such recipes would overwrite each other's tables and LoRA.
    by_folder: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        # The real path, because a link may lead to another recipe's folder.
        output = recipe.output_address
        same = address_hash(output) if isinstance(output, Url) else os.path.realpath(recipe.output_dir)
        by_folder.setdefault(same, []).append(recipe)

    mistakes: dict[Path, list[PlacedMistake]] = {}
    for sharing in by_folder.values():
        for recipe in sharing if len(sharing) > 1 else []:
            others = ", ".join(other.name for other in sharing if other is not recipe)
            what = f"recipe {others} has the same output_dir, {recipe.output_address}"
            if len(sharing) > 2:
                what = f"recipes {others} have the same output_dir, {recipe.output_address}"
            fix = f"use a separate folder, such as outputs/{recipe.name}"
            mistakes[recipe.source] = [placed(recipe, Mistake(("output_dir",), what, fix))]
    return mistakes


def working_copy(name: str, output: Address, root: Path) -> Path:
    """Return the local folder that jobs write to: `output` itself, or its working copy if it is an address.

    Two recipes, and two addresses, never share a working copy. A scratch folder may be deleted between jobs.
    """
    if not isinstance(output, Url):
        return output
    return scratch_folder(root) / f"{name}-{address_hash(output)[:8]}"


def _recipe(data: dict[str, Any], *, name: str, source: Path) -> Recipe:
    # A copy, because paths in it are joined to the project root.
    values = json.loads(json.dumps(data))
    values.setdefault("cache_dir", str(Recipe.model_fields["cache_dir"].default))
    lora = values.get("training", {}).get("lora", {})

    path_keys = [(values, "cache_dir"), (values, "output_dir"), (lora, "start_from")]
    path_keys += [(dataset, key) for dataset in values["datasets"] for key in ("path", "images")]
    path_keys += [
        (section, "path") for dataset in values["datasets"] for _, section in side_input_sections(dataset)
    ]
    for holder, key in path_keys:
        if holder.get(key) is not None:
            holder[key] = str(absolute(holder[key], project_root()))
    output = address(values["output_dir"])
    values |= {
        "output_dir": str(working_copy(name, output, project_root())),
        "output_address": values["output_dir"],
    }
    for prompt in values.get("training", {}).get("sample_prompts", []):
        if isinstance(prompt, dict) and prompt.get("references"):
            prompt["references"] = [str(absolute(path, project_root())) for path in prompt["references"]]

    # From JSON, because strict mode accepts a list for a tuple only there.
    return Recipe.model_validate_json(json.dumps({**values, "name": name, "source": str(source)}))
