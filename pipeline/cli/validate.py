"""`latentline validate`: is a recipe right, by itself, for its folders and for its model?"""

from __future__ import annotations

import click

from pipeline.cli.arguments import RECIPE
from pipeline.counting import counted
from pipeline.model_sizes import require_divisible
from pipeline.paths import require_isolation
from pipeline.recipe import Recipe


@click.command
@click.argument("recipe", type=RECIPE)
def command(recipe: Recipe) -> None:
    """Check RECIPE, a name or a file: every key, folders that are apart, sizes that the model can have."""
    require_isolation(recipe)
    require_divisible([recipe])
    click.echo(
        f"{recipe.source}: valid; {counted(len(recipe.datasets), 'dataset')}, output in {recipe.output_dir}"
    )
