"""Arguments that several subcommands take."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.recipe import Recipe, load_recipe, recipes_dir


class RecipeArgument(click.ParamType[Recipe]):
    """A recipe by its name in the recipes' folder, such as `flowers`, or by the path of its file."""

    name = "recipe"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Recipe:
        """The loaded recipe.

        Raises:
            RecipeError: The file is missing or wrong; all of its mistakes are in it.
        """
        if isinstance(value, Recipe):
            return value
        text = str(value)
        by_path = text.endswith((".yaml", ".yml")) or len(Path(text).parts) > 1
        return load_recipe(Path(text) if by_path else recipes_dir() / f"{text}.yaml")


RECIPE = RecipeArgument()
