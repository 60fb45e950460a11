"""The composition root: every recipe's graph, the resources that they share, and how jobs run.

Loaded by `dagster job execute -m assets.definitions` and by workspace.yaml; tests use `build_definitions`.
Nothing here or below may import torch, diffusers, transformers or accelerate.
"""

import atexit
import gc
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from dagster import Definitions, in_process_executor

from assets.asked_for import asked_for
from assets.last_words import is_dagster_command, keep, listen
from assets.naming import LAUNCHER_RESOURCE, TABLES_RESOURCE
from assets.recipe_graph import recipe_graph
from assets.run_end import run_tables
from pipeline.errors import RecipeError
from pipeline.models.size_multiple import require_size_multiple
from pipeline.recipe import Recipe, load_recipes
from pipeline.reporting.terminal import find_terminal
from resources.launcher import AccelerateLauncher


def build_definitions(recipes: Sequence[Recipe]) -> Definitions:
    """The definitions of `recipes`, all in one code location."""
    output_dirs = {recipe.name: recipe.output_dir for recipe in recipes}
    resources = {TABLES_RESOURCE: run_tables(output_dirs), LAUNCHER_RESOURCE: AccelerateLauncher()}
    shared = Definitions(resources=resources, executor=in_process_executor)
    return Definitions.merge(shared, *(recipe_graph(recipe, resources) for recipe in recipes))


_COLLECTED_EVERY = 10_000
"""New objects between two garbage collections of a `dagster` command; Python's own 700 are many a second."""


@contextmanager
def _kept_for_good() -> Generator[None]:
    """Let the garbage collector pass over what is made here, now and later: definitions live to the end.

    With 50 recipes it would else take an eighth of the time that Dagster needs for them. A `dagster` command
    collects less often from then on, and at its end the system takes the memory back as it is: what Dagster
    made of the definitions is not gone through again and again, and at last taken apart.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
        if is_dagster_command(sys.argv):
            gc.set_threshold(_COLLECTED_EVERY)
            atexit.register(gc.freeze)


def _load() -> Definitions:
    listen()
    find_terminal()
    try:
        with _kept_for_good():
            recipes = load_recipes()
            require_size_multiple(recipes)
            return build_definitions(asked_for(sys.argv, recipes))
    except RecipeError as err:
        keep(f"{type(err).__name__}: {err}")
        raise


defs = _load()
