"""The composition root: every recipe's graph, the resources they share, and their executor.

Nothing imported from here may import torch, diffusers, transformers or accelerate.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import click
from dagster import Definitions, colored_console_logger, definitions

from assets.alerts import alert_sensors
from assets.automation import dead_runs_sensor
from assets.deployment import build_executor, build_launcher, gpu_pool
from assets.location import Location
from assets.recipe_graph import broken_recipe_graphs, recipe_graph
from assets.sources import source_assets, start_dependency
from pipeline.errors import RecipeError
from pipeline.escaping import printable_lines
from pipeline.models.size_multiple import require_size_multiple
from pipeline.recipe import (
    BrokenRecipe,
    Recipe,
    RecipeFolder,
    load_recipe_files,
    load_recipe_folder,
    recipes_dir,
)
from pipeline.recipe.deployment import DEPLOYMENT_VARIABLE, Deployment, load_deployment
from pipeline.reporting.terminal import find_terminal
from resources.recipe_executor import recipe_executor
from resources.tables import TableIOManager
from resources.terminal_log import TERMINAL_LOGGER, terminal_logger

STRICT_VARIABLE = "LATENTLINE_STRICT"
"""Environment variable; with 1, a broken recipe fails the definitions, for checks of them in CI."""


def shared_definitions(
    recipes: Sequence[Recipe], broken: Sequence[BrokenRecipe], deployment: Deployment, location: Location
) -> Definitions:
    """Return what the recipes of a code location share: resources, sensors and source assets."""
    return Definitions(
        resources={
            location.tables: TableIOManager(recipes=recipes),
            location.launcher: build_launcher(deployment),
        },
        sensors=[dead_runs_sensor(location), *alert_sensors(recipes, broken, location)],
        assets=source_assets(recipes),
    )


def build_definitions(
    recipes: Sequence[Recipe],
    broken: Sequence[BrokenRecipe] = (),
    *,
    deployment: Deployment | None = None,
) -> Definitions:
    """Return the definitions of `recipes`, and the errors of `broken` ones, all in one code location.

    Raises:
        DeploymentError: The deployment is invalid, or names something that is not installed.
    """
    deployment = load_deployment() if deployment is None else deployment
    location = Location(gpu_pool(deployment))
    usable_graphs = [
        recipe_graph(recipe, location, start=start_dependency(recipe, recipes)) for recipe in recipes
    ]
    names = [recipe.name for recipe in recipes]
    # Also for assets that somebody selects by hand, because the location has nothing but recipes.
    defaults = Definitions(
        executor=recipe_executor(build_executor(deployment), recipes),
        loggers={"console": colored_console_logger, TERMINAL_LOGGER: terminal_logger},
    )
    shared = shared_definitions(recipes, broken, deployment, location)
    broken_graphs = broken_recipe_graphs(broken, names, location)
    return Definitions.merge(defaults, shared, *usable_graphs, *broken_graphs)


def load_project_recipes(files: Sequence[Path] | None = None) -> RecipeFolder:
    """Return the recipes in `files`, by default the project's folder of recipes.

    A recipe with bucket edges that its model rejects is broken.
    """
    recipes, broken = load_recipe_folder() if files is None else load_recipe_files(files)
    usable: list[Recipe] = []
    for recipe in recipes:
        try:
            require_size_multiple([recipe])
        except RecipeError as err:
            broken.append(
                BrokenRecipe(
                    recipe.name,
                    recipe.source,
                    err,
                    recache=recipe.recache,
                    optional_assets=recipe.optional_assets,
                )
            )
        else:
            usable.append(recipe)
    return RecipeFolder(usable, broken)


FileContents: TypeAlias = tuple[tuple[Path, bytes], ...]


def read_files(recipe_files: Iterable[Path]) -> FileContents:
    """Return the content of recipes and of the deployment, as a key for definitions that follow from them."""
    deployment = os.environ.get(DEPLOYMENT_VARIABLE, "")
    contents: dict[Path, bytes] = {}
    for file in (*recipe_files, *([Path(deployment)] if deployment else [])):
        with suppress(OSError):  # loading reports a file that cannot be read
            contents[file.absolute()] = file.read_bytes()
    return tuple(contents.items())


def is_strict() -> bool:
    """Return True if broken recipes fail the definitions."""
    return os.environ.get(STRICT_VARIABLE, "").strip() not in ("", "0")


@definitions
def defs() -> Definitions:
    """Return the definitions of the project's recipes, for Dagster's commands and code servers."""
    return _project_definitions(read_files(sorted(recipes_dir().glob("*.y*ml"))), is_strict=is_strict())


# For one job, Dagster loads the definitions up to five times in a process, the last time when standard error
# is no longer the terminal.
@lru_cache(maxsize=1)
def _project_definitions(contents: FileContents, *, is_strict: bool) -> Definitions:
    del contents
    find_terminal()
    recipes, broken = load_project_recipes()
    if broken and is_strict:
        raise RecipeError(
            "\n".join(each.summary() for each in broken),
            where=f"{recipes_dir()}, with {STRICT_VARIABLE}",
            fix=f"repair these recipes, or unset {STRICT_VARIABLE} to load the other ones without them",
        )
    for each in broken:
        click.echo(printable_lines(f"warning: {each.summary()}"), err=True)
    return build_definitions(recipes, broken)
