"""Arguments that several subcommands take."""

from __future__ import annotations

import difflib
from pathlib import Path

import click

from pipeline.errors import RecipeError
from pipeline.recipe import Recipe, load_recipe, path_in_recipe, recipes_dir

_MAX_NAMES = 10


class RecipeArgument(click.ParamType[Recipe]):
    """A recipe by its name in the recipes' folder, such as `flowers`, or by the path of its file."""

    name = "recipe"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Recipe:
        """The loaded recipe, whose name is also noted in the context's `obj`.

        Raises:
            RecipeError: The file is missing or wrong; all of its mistakes are in it.
        """
        if isinstance(value, Recipe):
            return value
        text = str(value)
        by_path = text.endswith((".yaml", ".yml")) or len(Path(text).parts) > 1
        file = Path(text) if by_path else recipes_dir() / f"{text}.yaml"
        if not file.exists():
            raise _no_such(text, file.absolute())
        recipe = load_recipe(file)
        if ctx is not None and isinstance(ctx.obj, dict):
            ctx.obj["recipe"] = recipe.name
        return recipe


def _no_such(text: str, file: Path) -> RecipeError:
    """For a recipe that is not there: the name that may be meant, or all that there are."""
    folder = file.parent
    names = sorted(each.stem for each in folder.glob("[!.]*.yaml")) if folder.is_dir() else []
    close = difflib.get_close_matches(file.stem, names, n=1)
    fix = f"there are {', '.join(names[:_MAX_NAMES])}" if names else "name the file of a recipe"
    fix += ", ..." if len(names) > _MAX_NAMES else ""
    return RecipeError(
        f"there is no recipe {text}", where=str(file), fix=f"did you mean {close[0]}?" if close else fix
    )


def as_recipes_have_it(named: str) -> str:
    """A folder that is there, relative to the project root or else whole; a Hub id, or what is not, as it is.

    What a user names is relative to the working directory, and what a recipe names to the project root.
    """
    place = Path(named).expanduser()
    return path_in_recipe(place) if place.exists() else named


RECIPE = RecipeArgument()
