"""The composition root: every recipe's graph, the resources they share, and the executor of their jobs.

Loaded by `dagster job execute -m assets.definitions` and by workspace.yaml; tests call `build_definitions`.
Nothing imported from here may import torch, diffusers, transformers or accelerate.
"""

from collections.abc import Sequence

from dagster import Definitions, colored_console_logger, in_process_executor

from assets.names import LAUNCHER_RESOURCE, TABLES_RESOURCE
from assets.recipe_graph import recipe_graph
from assets.run_summary import print_summary_at_exit, run_tables
from pipeline.models.size_multiple import require_size_multiple
from pipeline.recipe import Recipe, load_recipes
from pipeline.reporting.terminal import find_terminal
from resources.launcher import AccelerateLauncher
from resources.terminal_log import TERMINAL_LOGGER, terminal_logger


def build_definitions(recipes: Sequence[Recipe]) -> Definitions:
    """Return the definitions of `recipes`, all in one code location."""
    shared = Definitions(
        resources={
            TABLES_RESOURCE: run_tables({recipe.name: recipe.output_dir for recipe in recipes}),
            LAUNCHER_RESOURCE: AccelerateLauncher(),
        },
        loggers={"console": colored_console_logger, TERMINAL_LOGGER: terminal_logger},
        executor=in_process_executor,
    )
    return Definitions.merge(shared, *(recipe_graph(recipe) for recipe in recipes))


def _load_definitions() -> Definitions:
    print_summary_at_exit()
    find_terminal()
    recipes = load_recipes()
    require_size_multiple(recipes)
    return build_definitions(recipes)


defs = _load_definitions()
