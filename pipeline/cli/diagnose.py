"""`latentline diagnose`: measure with the base model which captions do not fit their images."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from pipeline.cli.conventions import RECIPE_WITH_OUTPUTS, echo, log_to_stderr
from pipeline.cli.optional_stage import run_stage
from pipeline.cli.sample import STOPPED_STATUS
from pipeline.recipe import Recipe

if TYPE_CHECKING:
    from pipeline.reporting.reports import Report


@click.command(short_help="Find captions that do not fit their images.")
@click.argument("recipe", type=RECIPE_WITH_OUTPUTS)
def command(recipe: Recipe) -> None:
    """Find images of RECIPE that fit other captions better than their own.

    The base model's loss on each image is measured under its own caption, under this caption with a word
    exchanged, and under captions of other images, with the same noise. It needs no training, but the caches:
    after a change of images or captions, run `latentline run RECIPE --cache-only` first.

    The losses are entries of the cache. So an unchanged caption is not measured again, and a diagnosis that
    was stopped continues where it ended.
    """
    try:
        report = _diagnose(recipe)
    except KeyboardInterrupt:
        echo("\nStopped. Captions that are measured are in the cache.", err=True)
        echo("  fix:   run the command again, which measures the others", err=True)
        sys.exit(STOPPED_STATUS)
    _show(recipe, report)


def _diagnose(recipe: Recipe) -> Report:
    from pipeline.diagnosis import checks
    from pipeline.diagnosis.stage import ASSET, diagnose
    from pipeline.storage.tables import Tables

    tables = Tables(recipe.output_dir, log=log_to_stderr)
    latents, text = tables.read("vae_latents"), tables.read("text_embeddings")
    return run_stage(
        recipe,
        ASSET,
        lambda tables, launch: diagnose(recipe, latents, text, tables, launch=launch, log=log_to_stderr),
        checks.run,
    )


def _show(recipe: Recipe, report: Report) -> None:
    from pipeline.diagnosis.stage import ASSET
    from pipeline.outputs.stage_files import table_file

    for each in report["worst"]:
        score = f"{each['score']:+.3f} ({each['low']:+.3f} to {each['high']:+.3f})"
        echo(f"{score}  {each['sample_id']}: {each['caption']}")
        echo(f"{'':25} fits better: {each['better_caption']}")
    echo(report["why"])
    echo(f"table: {recipe.output_dir / table_file(ASSET)}; pictures: {recipe.output_dir / 'reports' / ASSET}")
