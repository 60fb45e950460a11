"""`latentline sweep`: train variants of a recipe by successive halving, and name the best one."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, echo, log_to_stderr
from pipeline.cli.optional_stage import run_stage
from pipeline.cli.sample import STOPPED_STATUS
from pipeline.recipe import Recipe

if TYPE_CHECKING:
    from pipeline.reporting.reports import Report


@click.command(short_help="Compare variants of a recipe, and find the best one.")
@click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
@click.option(
    "--find",
    type=click.Choice(["learning_rate"]),
    help="Propose the middle of a grid by a range test: a short run with a rising rate, measured on held-out "
    "images. RECIPE needs no section sweep.",
)
def command(recipe: Recipe, find: str | None) -> None:
    """Train the variants of RECIPE that its section sweep declares, and find the best one.

    All variants are trained to a fraction of their steps and compared with the same pictures, or with the
    losses on the same held-out images. The better ones go on, until the last ones are complete. The run of
    RECIPE itself, its tables and lora/ stay as they are. The command needs the caches: after a change of
    images or captions, run `latentline run RECIPE --cache-only` first.

    Ctrl-C stops the training after a checkpoint. The same command continues it, and trains nothing twice.
    """
    try:
        if find is not None:
            _find_learning_rate(recipe)
            return
        report = _sweep(recipe)
    except KeyboardInterrupt:
        echo("\nStopped. The variants have checkpoints, and pictures are in the cache.", err=True)
        echo("  fix:   run the command again, which continues the sweep", err=True)
        sys.exit(STOPPED_STATUS)
    _show(recipe, report)


def _find_learning_rate(recipe: Recipe) -> None:
    from pipeline.processes.launch import LocalLaunch
    from pipeline.reporting.terminal import TERMINAL_VARIABLE
    from pipeline.storage.tables import Tables
    from pipeline.sweep.range_test import find_learning_rate

    tables = Tables(recipe.output_dir, log=log_to_stderr)
    latents, text = tables.read("vae_latents"), tables.read("text_embeddings")
    # On a terminal, the launched process draws a bar, and its lines would disturb it.
    launch = LocalLaunch(recipe.accelerate, None if TERMINAL_VARIABLE in os.environ else log_to_stderr)
    proposal = find_learning_rate(recipe, latents, text, launch=launch, log=log_to_stderr)
    echo(proposal.why)
    rates = ", ".join(f"{factor * proposal.rate:.2g}" for factor in (0.5, 1, 2))
    echo(f"grid: {{training.learning_rate: [{rates}]}}")


def _sweep(recipe: Recipe) -> Report:
    from pipeline.storage.tables import Tables
    from pipeline.sweep import checks
    from pipeline.sweep.stage import ASSET, sweep
    from pipeline.sweep.variants import require_sweep

    # Before the tables, which a recipe without the section may not have yet.
    require_sweep(recipe)
    tables = Tables(recipe.output_dir, log=log_to_stderr)
    latents, text = tables.read("vae_latents"), tables.read("text_embeddings")
    return run_stage(
        recipe,
        ASSET,
        lambda tables, launch: sweep(recipe, latents, text, launch=launch, log=log_to_stderr),
        checks.run,
    )


def _show(recipe: Recipe, report: Report) -> None:
    from pipeline.outputs.stage_files import table_file
    from pipeline.sweep.stage import ASSET

    for row in report["variants"]:
        score = "-" if row["score"] is None else f"{row['score']:.3g}"
        behind = ""
        if row["low"] is not None:
            behind = f"; behind by {row['behind']:.3g} ({row['low']:.3g} to {row['high']:.3g})"
        fate = f"; failed: {row['error']}" if row["error"] is not None else behind
        name = f"{row['variant']:>4}{'*' if row['variant'] == report['winner'] else ' '}"
        echo(f"{name} step {row['step']:>7,} {score:>9}  {row['settings']}{fate}")
    echo(report["why"])
    share = report["steps"] / max(1, report["steps_of_all"])
    echo(f"{report['steps']:,} steps, {share:.0%} of what all variants would take to their ends")
    pictures = recipe.output_dir / "reports" / ASSET
    echo(f"table: {recipe.output_dir / table_file(ASSET)}; pictures: {pictures}")
