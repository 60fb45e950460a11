"""`latentline run`: execute a recipe's job, with progress and a summary on the terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from pipeline.cli.conventions import RECIPE
from pipeline.errors import FileAccessError
from pipeline.recipe import Recipe, project_root
from pipeline.recipe.load import CONFIGS_VARIABLE
from pipeline.storage.addresses import expanded

HOME_VARIABLE = "DAGSTER_HOME"

RUN_MODULE = "assets.run"
"""Module that executes the job. It imports Dagster, so this package only starts it by name."""


@click.command(short_help="Encode what the cache lacks, and train the LoRA.")
@click.argument("recipe", type=RECIPE)
@click.option("--cache-only", is_flag=True, help="Stop before training: execute only the cache job.")
def command(recipe: Recipe, cache_only: bool) -> None:
    """Check the images and captions of RECIPE, encode those that the cache lacks, and train the LoRA.

    Ctrl-C stops the run after a checkpoint. The same command resumes it.

    The run is the Dagster job RECIPE_train, or RECIPE_cache with --cache-only, in the instance of the project
    (.dagster/), so that `make ui` shows it. DAGSTER_HOME selects another instance.

    The exit status is 0 if the job finished, 1 after an error or if a check stopped the job, and 130 if you
    stopped it.
    """
    environment = {
        **os.environ,
        HOME_VARIABLE: str(dagster_home()),
        CONFIGS_VARIABLE: str(recipe.source.parent),
    }
    job = f"{recipe.name}_{'cache' if cache_only else 'train'}"

    # The module replaces this process, so that signals and the exit status need no forwarding.
    arguments = [sys.executable, "-m", RUN_MODULE, str(recipe.source), job]
    os.execve(sys.executable, arguments, environment)  # noqa: S606 - no shell is wanted


def dagster_home() -> Path:
    """Return the existing folder of the Dagster instance: `DAGSTER_HOME`, or `.dagster` in the project."""
    chosen = os.environ.get(HOME_VARIABLE, "")
    folder = expanded(chosen).absolute() if chosen else project_root() / ".dagster"
    if not folder.is_dir():
        raise FileAccessError(
            f"the folder of the Dagster instance does not exist: {folder}",
            where=f"environment variable {HOME_VARIABLE}" if chosen else str(project_root()),
            fix=f"create the folder, or unset {HOME_VARIABLE} to use {project_root() / '.dagster'}"
            if chosen
            else "restore the folder .dagster of the checkout: git checkout -- .dagster",
        )
    return folder
