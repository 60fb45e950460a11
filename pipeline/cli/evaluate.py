"""`latentline evaluate`: draw pictures with each step of a run."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, echo, log_to_stderr
from pipeline.cli.sample import STOPPED_STATUS, parse_steps
from pipeline.recipe import Recipe


@click.command(short_help="Draw pictures with each step of a run.")
@click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
@click.option("--run", help="Run to evaluate: a folder name in runs/. By default the run of lora/.")
@click.option(
    "--step",
    "steps",
    multiple=True,
    metavar="N[,N...]|all",
    callback=lambda _ctx, _option, values: parse_steps(values),
    help="Steps to evaluate. By default evaluation.steps.",
)
def command(recipe: Recipe, run: str | None, steps: Any) -> None:
    """Draw pictures with each step of a run of RECIPE, and with the base model.

    Prompts and number of pictures are in the section evaluation of the recipe. Without the section, its
    defaults apply.

    Pictures are entries of the cache. So what was drawn before is reused, and an evaluation that was stopped
    continues where it ended.
    """
    from pipeline.evaluation.prepare import Request
    from pipeline.evaluation.stage import evaluate
    from pipeline.processes.launch import LocalLaunch
    from pipeline.reporting.terminal import TERMINAL_VARIABLE

    # On a terminal, the launched process draws a bar, and its lines would disturb it.
    launch = LocalLaunch(recipe.accelerate, None if TERMINAL_VARIABLE in os.environ else log_to_stderr)
    try:
        evaluate(recipe, Request(run, steps or None), launch=launch, log=log_to_stderr)
    except KeyboardInterrupt:
        echo("\nStopped. Pictures that are complete are in the cache.", err=True)
        echo("  fix:   run the command again, which draws the others", err=True)
        sys.exit(STOPPED_STATUS)
