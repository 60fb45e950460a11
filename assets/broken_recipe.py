"""What Dagster shows for a recipe that cannot be used: its error, and jobs that fail with it."""

import re
from collections.abc import Collection, Sequence

from dagster import AssetKey, AssetSpec, Definitions, JobDefinition, OpDefinition, job, op

from assets.names import DEFAULT_RUN_CONFIG, RECIPE_TAG
from pipeline.errors import RecipeError
from pipeline.escaping import markdown_block
from pipeline.recipe import BrokenRecipe
from resources.failures import errors_as_failures
from resources.terminal_log import TERMINAL_LOGGER, terminal_logger

ERROR_ASSET = "recipe_error"
"""Last part of the key of the external asset that shows a recipe's error."""


def broken_recipe_graphs(broken: Sequence[BrokenRecipe], taken: Collection[str]) -> list[Definitions]:
    """Return the definitions of each broken recipe, without the resources, which all recipes share.

    Args:
        broken: The recipes.
        taken: Names of the usable recipes.
    """
    names = set(taken)
    graphs: list[Definitions] = []
    for recipe in broken:
        name = _free_name(recipe.name, names)
        names.add(name)
        graphs.append(_graph(name, recipe.error))
    return graphs


def _free_name(name: str, taken: Collection[str]) -> str:
    """Return the file's name as a Dagster name that is not taken; Dagster allows letters, digits and _."""
    valid = re.sub(r"[^A-Za-z0-9_]", "_", name)
    number = 2
    free = valid
    while free in taken:
        free = f"{valid}_{number}"
        number += 1
    return free


def _graph(name: str, error: RecipeError) -> Definitions:
    """Return an external asset with the error as its description, and both jobs of the recipe.

    There is no schedule and no sensor, because their runs could only fail.
    """
    shown = AssetSpec(
        AssetKey([name, ERROR_ASSET]),
        description=f"This recipe is excluded until its file is repaired.\n\n{markdown_block(str(error))}",
        group_name=name,
        kinds={"yaml"},
        metadata={"what": error.what, "where": error.where, "fix": error.fix},
    )
    failing_op = _failing_op(name, error)
    jobs = [_job_of(failing_op, name=f"{name}_{kind}", recipe=name) for kind in ("cache", "train")]
    return Definitions(assets=[shown], jobs=jobs)


def _failing_op(name: str, error: RecipeError) -> OpDefinition:
    @op(name=f"{name}__{ERROR_ASSET}")
    def recipe_error() -> None:
        """Fail with the error of the recipe."""
        with errors_as_failures():
            raise error

    return recipe_error


def _job_of(failing_op: OpDefinition, *, name: str, recipe: str) -> JobDefinition:
    @job(
        name=name,
        description="Fails with the error of the recipe.",
        tags={RECIPE_TAG: recipe},
        config=DEFAULT_RUN_CONFIG,
        logger_defs={TERMINAL_LOGGER: terminal_logger},
    )
    def failing_job() -> None:
        failing_op()

    return failing_job
