"""Loading of recipes: all mistakes of a file in one error, each with its line; other recipes stay usable."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from pipeline.errors import RecipeError, verb
from pipeline.recipe.datasets import side_input_sections
from pipeline.recipe.deployment import scratch_folder
from pipeline.recipe.errors import RECIPE, Mistake, PlacedMistake, find_mistakes, recipe_error
from pipeline.recipe.packed import unpack_into
from pipeline.recipe.project import path_in_recipe, project_root
from pipeline.recipe.schema import RecacheSettings, Recipe, name_mistake, valid_name
from pipeline.recipe.untrusted import is_untrusted, link_mistake, untrusted_mistakes
from pipeline.recipe.yaml_document import Document, parse
from pipeline.recipe.yaml_file import read_yaml_file
from pipeline.storage.addresses import Address, Url, absolute, address, address_hash, expanded
from pipeline.storage.table_columns import OPTIONAL_ASSETS

CONFIGS_VARIABLE = "LATENTLINE_CONFIGS"
"""Environment variable with the folder of recipes; the default is configs/."""


def recipes_dir() -> Path:
    """Return the folder of recipes: `LATENTLINE_CONFIGS` (relative to the working directory), or configs/."""
    chosen = os.environ.get(CONFIGS_VARIABLE, "")
    return expanded(chosen).absolute() if chosen else project_root() / "configs"


def load_recipe(file: Path) -> Recipe:
    """Return the recipe in `file`; all mistakes are in one RecipeError, with line, key and fix."""
    read = _read(expanded(str(file)).absolute())
    if read.recipe is None:
        raise recipe_error(read.mistakes)
    return read.recipe


@dataclass(frozen=True)
class BrokenRecipe:
    """A recipe that cannot be used; its name, the stem of the file, may contain any character.

    Attributes:
        recache: Its section `recache`, or the defaults if that cannot be read.
        optional_assets: Assets that it has in addition to those of every recipe, as far as it can be read.
        recipe: The recipe if each of its values is valid, but its output folder belongs to another recipe.
    """

    name: str
    file: Path
    error: RecipeError
    recache: RecacheSettings = field(default_factory=RecacheSettings)
    optional_assets: tuple[str, ...] = ()
    recipe: Recipe | None = None

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

    Recipes with mistakes are returned separately. Of recipes that share an output folder, all are broken
    except its owner: the recipe whose job wrote it last, or else the one that it is named after.

    Raises:
        RecipeError: The folder does not exist.
    """
    folder = recipes_dir() if folder is None else Path(folder).absolute()
    if not folder.is_dir():
        fix = f"create it, or set {CONFIGS_VARIABLE} to the folder of your recipes"
        raise RecipeError("the folder of recipes does not exist", where=str(folder), fix=fix)

    return _usable(_read_folder(folder))


def load_recipe_files(files: Iterable[Path]) -> RecipeFolder:
    """Return the recipes of `files` as `load_recipe_folder` does; they may be in several folders."""
    return _usable([_read(expanded(str(file)).absolute()) for file in files])


def _usable(files: Sequence[_RecipeText]) -> RecipeFolder:
    shared = _shared_outputs(files)
    usable = [each.recipe for each in files if each.recipe is not None and each.file not in shared]
    broken = [
        BrokenRecipe(
            each.file.stem,
            each.file,
            recipe_error([*each.mistakes, *shared.get(each.file, ())]),
            recache=each.recache,
            optional_assets=each.optional_assets,
            recipe=each.recipe,
        )
        for each in files
        if each.recipe is None or each.file in shared
    ]
    return RecipeFolder(
        sorted(usable, key=lambda recipe: recipe.name), sorted(broken, key=lambda each: each.name)
    )


def require_own_output(recipe: Recipe) -> None:
    """Raise RecipeError if the recipe's output folder belongs to another recipe in the same folder."""
    folder = recipe.source.parent
    others = [each for each in _read_folder(folder) if each.file != recipe.source] if folder.is_dir() else []
    shared = _shared_outputs([*others, _RecipeText(recipe.source, recipe, [])])
    if recipe.source in shared:
        raise recipe_error(shared[recipe.source])


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
    return _placed(recipe.source, mistake)


def _placed(file: Path, mistake: Mistake) -> PlacedMistake:
    # A loaded recipe has no lines, so its file is read again.
    line = parse(file.read_text(encoding="utf-8")).line(mistake.path) if file.is_file() else None
    return PlacedMistake(path_in_recipe(file), mistake, line)


@dataclass(frozen=True)
class _RecipeText:
    """The recipe in a file, or its mistakes and the data that could be read."""

    file: Path
    recipe: Recipe | None
    mistakes: list[PlacedMistake]
    data: Any = None

    @property
    def output(self) -> Address | None:
        """Output folder; None if it cannot be read."""
        if self.recipe is not None:
            return self.recipe.output_address
        value = self.data.get("output_dir") if isinstance(self.data, dict) else None
        is_wrong = any(each.mistake.path == ("output_dir",) for each in self.mistakes)
        return absolute(value, project_root()) if isinstance(value, str) and not is_wrong else None

    @property
    def recache(self) -> RecacheSettings:
        """Section `recache`, or the defaults if it cannot be read."""
        if self.recipe is not None:
            return self.recipe.recache
        section = self.data.get("recache") if isinstance(self.data, dict) else None
        try:
            return RecacheSettings.model_validate(section or {})
        except ValidationError:
            return RecacheSettings()

    @property
    def optional_assets(self) -> tuple[str, ...]:
        """Assets that only some recipes have, by the sections that can be read."""
        if self.recipe is not None:
            return self.recipe.optional_assets
        data: dict[str, Any] = self.data if isinstance(self.data, dict) else {}
        present = {name for name in OPTIONAL_ASSETS if data.get(name) is not None}
        with suppress(LookupError, TypeError, AttributeError):
            if any((each.get("captions") or {}).get("from") == "model" for each in data["datasets"]):
                present.add("captions")
        return tuple(name for name in OPTIONAL_ASSETS if name in present)


def _read_folder(folder: Path) -> list[_RecipeText]:
    # Editors and macOS create hidden files.
    files = (file for file in sorted(folder.iterdir()) if not file.name.startswith("."))
    return [_read(file) for file in files if file.suffix in {".yaml", ".yml"}]


def _read(file: Path) -> _RecipeText:
    shown = path_in_recipe(file)
    if file.suffix == ".yml":
        what = f"the suffix of a recipe must be .yaml, got {file.name}"
        mistake = Mistake((), what, f"rename it to {file.stem}.yaml")
        return _RecipeText(file, None, [PlacedMistake(shown, mistake)])

    if is_untrusted() and (link := link_mistake(file, file.parent)) is not None:
        return _RecipeText(file, None, [PlacedMistake(shown, link)])

    document, file_mistakes = read_yaml_file(file, RECIPE)
    mistakes = [*(PlacedMistake(shown, mistake) for mistake in _name_mistakes(file.stem)), *file_mistakes]
    if not mistakes and is_untrusted():
        cache_dir = str(Recipe.model_fields["cache_dir"].default)
        untrusted = untrusted_mistakes(document.data, project_root(), cache_dir=cache_dir)
        mistakes = [PlacedMistake(shown, each, document.line(each.path)) for each in untrusted]
    if mistakes:
        return _RecipeText(file, None, mistakes, document.data)
    return _RecipeText(file, _recipe(document.data, name=file.stem, source=file), [])


def _name_mistakes(name: str) -> list[Mistake]:
    what = name_mistake(name)
    if what is None:
        return []
    return [Mistake((), what, f"rename the file, for example to {valid_name(name)}.yaml")]


def _shared_outputs(files: Sequence[_RecipeText]) -> dict[Path, list[PlacedMistake]]:
    """Return the mistake of each file with the output folder of another recipe."""
    # Such recipes would overwrite each other's tables and LoRA. A recipe with other mistakes counts too,
    # because a copy must not use its folder until it is repaired.
    by_folder: dict[str, list[tuple[_RecipeText, Address]]] = {}
    for file in files:
        if (output := file.output) is not None:
            by_folder.setdefault(_identity(output), []).append((file, output))

    mistakes: dict[Path, list[PlacedMistake]] = {}
    for sharing in (each for each in by_folder.values() if len(each) > 1):
        owner = _owner(sharing)
        for file, output in sharing:
            name = file.file.stem
            if name == owner:
                continue
            others = [other.file.stem for other, _ in sharing if other is not file]
            what = f"output_dir {output} belongs to recipe {owner}"
            fix = f"use a separate folder, such as {_free_folder(name, output, by_folder)}"
            if owner is None:
                subject = f"recipe{'s' if len(others) > 1 else ''} {', '.join(others)}"
                what = f"{subject} {verb(len(others), 'has', 'have')} the same output_dir, {output}"
                fix += ", in all of these recipes but one"
            mistakes[file.file] = [_placed(file.file, Mistake(("output_dir",), what, fix))]
    return mistakes


def _identity(output: Address) -> str:
    # The real path, because a link may lead to another recipe's folder.
    return address_hash(output) if isinstance(output, Url) else os.path.realpath(output)


def _owner(sharing: Sequence[tuple[_RecipeText, Address]]) -> str | None:
    """Return the name of the recipe to which a shared output folder belongs; None if that is unknown."""
    # A recipe that `latentline new` is about to write has no file yet and owns nothing.
    names = {file.file.stem for file, _ in sharing if file.file.exists()}

    # Each recipe has its own working copy of an output folder at an address.
    folders = {working_copy(file.file.stem, output, project_root()) for file, output in sharing}
    writers = {_last_writer(folder) for folder in folders} & names
    if len(writers) == 1:
        return writers.pop()
    return next((output.name for _, output in sharing if output.name in names), None)


def _last_writer(output_dir: Path) -> str | None:
    """Return the name of the recipe whose job wrote a local output folder last."""
    # Reports of 0.3.0 and earlier do not name their recipe, but the LoRA's provenance does.
    for file, keys in (
        ("reports/raw_images.json", ("recipe",)),
        ("lora/provenance.json", ("recipe", "name")),
    ):
        with suppress(OSError, ValueError, KeyError, TypeError):
            value = json.loads((output_dir / file).read_text(encoding="utf-8"))
            for key in keys:
                value = value[key]
            return str(value)
    return None


def _free_folder(name: str, output: Address, taken: Collection[str]) -> str:
    """Return a folder next to `output`, named after a recipe, that neither exists nor is in `taken`."""
    name = name if name_mistake(name) is None else valid_name(name)
    names = (name if number == 1 else f"{name}_{number}" for number in count(1))
    folders = (
        Url(f"{output.parent}/{each}") if isinstance(output, Url) else output.parent / each for each in names
    )
    free = next(
        each
        for each in folders
        if _identity(each) not in taken and (isinstance(each, Url) or not os.path.lexists(each))
    )
    return free if isinstance(free, Url) else path_in_recipe(free)


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

    context = values["model"].get("context_lora") or {}
    path_keys = [(values, "cache_dir"), (values, "output_dir"), (lora, "start_from"), (context, "path")]
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
    packed = {each["name"]: unpack_into(each, scratch_folder(project_root())) for each in values["datasets"]}
    values["packed_paths"] = [[name, str(path)] for name, path in packed.items() if path is not None]
    evaluation: dict[str, Any] = values.get("evaluation") or {}
    evaluated: Any = evaluation.get("prompts", [])
    prompts = values.get("training", {}).get("sample_prompts", [])
    for prompt in (*prompts, *(evaluated if isinstance(evaluated, list) else [])):
        if isinstance(prompt, dict) and prompt.get("references"):
            prompt["references"] = [str(absolute(path, project_root())) for path in prompt["references"]]

    # From JSON, because strict mode accepts a list for a tuple only there.
    return Recipe.model_validate_json(json.dumps({**values, "name": name, "source": str(source)}))
