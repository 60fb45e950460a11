"""`latentline validate`: is a recipe right, and are its folders apart?"""

from __future__ import annotations

import click

from pipeline.cli.arguments import RECIPE
from pipeline.paths import require_isolation
from pipeline.recipe import Recipe


@click.command
@click.argument("recipe", type=RECIPE)
def command(recipe: Recipe) -> None:
    """Check RECIPE, a name or a file: every key, and that dataset, cache and output folders are apart."""
    require_isolation(recipe)
    click.echo(f"{recipe.source}: valid; {len(recipe.datasets)} datasets, output in {recipe.output_dir}")
