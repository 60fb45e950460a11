"""Conventions that the subcommands share: the recipe argument, paths, and numbers as text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import click

from pipeline.errors import PathIsolationError, RecipeError
from pipeline.escaping import printable_lines
from pipeline.recipe import (
    BrokenRecipe,
    Recipe,
    RecipeFolder,
    load_recipe,
    load_recipe_files,
    load_recipe_folder,
    path_in_recipe,
    project_root,
    recipes_dir,
)
from pipeline.recipe.component_files import component_recipe_files
from pipeline.storage.addresses import Url, expanded

_MAX_NAMES = 10


class RecipeArgument(click.ParamType[Recipe]):
    """Recipe, given by its name in the recipes folder, such as `flowers`, or by the path of its file."""

    name = "recipe"

    def __init__(self, *, reads_outputs: bool = False, may_share_output: bool = False) -> None:
        """Create the type.

        With `reads_outputs`, outputs at an address are fetched before the command. With `may_share_output`,
        the command itself reports an output folder that belongs to another recipe, next to other mistakes.
        """
        self._reads_outputs = reads_outputs
        self._may_share_output = may_share_output

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Recipe:
        """Load the recipe and store its name in the context's `obj`, for `main`."""
        if isinstance(value, Recipe):
            return value

        # A text without a folder and without a suffix is a name.
        text = str(value)
        is_path = text.endswith((".yaml", ".yml")) or len(Path(text).parts) > 1
        file = (expanded(text) if is_path else recipes_dir() / f"{text}.yaml").absolute()
        if not file.exists():
            raise _no_such_recipe(text, file)

        recipe = _load(file, may_share_output=self._may_share_output)
        if ctx is not None and isinstance(ctx.obj, dict):
            ctx.obj["recipe"] = recipe.name
        if self._reads_outputs:
            _fetch_outputs(recipe)
        return recipe

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str | None:
        """Return the sentence that follows "Missing argument 'RECIPE'."; names the recipes of the folder."""
        folder = recipes_dir()
        names = _names_in(folder)
        return (
            f"Use one of {_listed(names)}."
            if names
            else f"{folder} contains none; create one with latentline new."
        )


RECIPE = RecipeArgument()

RECIPE_WITH_OUTPUTS = RecipeArgument(reads_outputs=True)

RECIPE_TO_CHECK = RecipeArgument(may_share_output=True)


def reported_recipes() -> RecipeFolder:
    """Return the recipes of the recipes folder and of components, and report each broken one.

    Raises:
        RecipeError: There is neither a folder nor a component, or a `defs.yaml` cannot be read.
    """
    folder = recipes_dir()
    files = [each for each in component_recipe_files(project_root()) if each.parent != folder.resolve()]
    recipes, broken = load_recipe_files(files)
    if folder.is_dir() or not files:
        in_folder = load_recipe_folder()
        recipes, broken = [*in_folder.recipes, *recipes], [*in_folder.broken, *broken]
    _report(broken)
    return RecipeFolder(recipes, broken)


def report_broken_recipes() -> None:
    """Report each broken recipe of the recipes folder on standard error."""
    # Commands that need no recipe also work without the folder.
    if recipes_dir().is_dir():
        _report(load_recipe_folder().broken)


def _fetch_outputs(recipe: Recipe) -> None:
    if not isinstance(recipe.output_address, Url):
        return
    from pipeline.outputs.folder import outputs_of
    from pipeline.outputs.stage_files import fetch_for_command

    # Nothing is fetched into a local folder that overlaps a dataset; the command reports the conflict.
    with suppress(PathIsolationError):
        fetch_for_command(outputs_of(recipe, log_to_stderr))


def _load(file: Path, *, may_share_output: bool) -> Recipe:
    # In the recipes folder, all recipes are loaded, because two of them may share an output folder.
    if file.parent != recipes_dir():
        return load_recipe(file)

    folder = load_recipe_folder()
    _report([each for each in folder.broken if each.file != file])
    for broken in folder.broken:
        if broken.file == file:
            if may_share_output and broken.recipe is not None:
                return broken.recipe
            raise broken.error
    # The folder's recipes do not include hidden files, which can still be given by their path.
    return next((recipe for recipe in folder.recipes if recipe.source == file), None) or load_recipe(file)


def echo(text: str, *, err: bool = False) -> None:
    """Print a line to standard output or error, with control characters of names as escapes."""
    click.echo(printable_lines(text), err=err)


def _report(broken: Iterable[BrokenRecipe]) -> None:
    for each in broken:
        echo(f"warning: {each.summary()}", err=True)


def _no_such_recipe(text: str, file: Path) -> RecipeError:
    folder = file.parent
    names = _names_in(folder)
    closest = difflib.get_close_matches(file.stem, names, n=1)
    if closest:
        fix = f"did you mean {closest[0]}?"
    elif names:
        fix = f"use one of {_listed(names)}"
    else:
        fix = "pass the path of a recipe file"
    return RecipeError(f"the recipe {text} does not exist", where=str(file), fix=fix)


def _names_in(folder: Path) -> list[str]:
    return sorted(each.stem for each in folder.glob("[!.]*.yaml")) if folder.is_dir() else []


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")


def as_recipe_path(text: str) -> str:
    """Return an existing path as a recipe writes it; Hub ids and missing paths are returned unchanged."""
    # Paths on a command line are relative to the working directory, paths in recipes to the project root.
    path = expanded(text)
    return path_in_recipe(path) if path.exists() else text


def log_to_stderr(line: str) -> None:
    """Print a line of progress or a warning on standard error."""
    # Standard output has the result alone, so that it can be piped.
    echo(line, err=True)


def bytes_text(number: int) -> str:
    """Format a size with powers of 1000, such as "712 bytes" or "1.4 MB"."""
    if number < 1000:
        return f"{number} bytes"
    value = float(number)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        # Three significant digits of a larger value would be 1e+03.
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value / 1000:,.3g} TB"


def seconds_text(seconds: float) -> str:
    """Format a duration, such as "0.4 s", "12 min" or "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 99.5 else f"{seconds:.0f} s"  # not 1e+02
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
