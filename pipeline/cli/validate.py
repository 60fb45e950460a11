"""`latentline validate`: is a recipe right, by itself, for its folders, its datasets and its model?"""

from __future__ import annotations

import click

from pipeline.cli.arguments import RECIPE
from pipeline.errors import counted
from pipeline.models.resolve import check_local_base
from pipeline.models.size_multiple import require_size_multiple
from pipeline.recipe import Recipe
from pipeline.recipe.isolation import require_isolation
from pipeline.recipe.load import require_own_output


@click.command
@click.argument("recipe", type=RECIPE)
def command(recipe: Recipe) -> None:
    """Check RECIPE, a name or a file: keys, folders, datasets, a local model; nothing is downloaded."""
    from pipeline.raw_images.walk import require_readable  # imports Polars, which only valid recipes need

    require_isolation(recipe)
    require_own_output(recipe)
    require_size_multiple([recipe])
    for dataset in recipe.datasets:
        require_readable(dataset)
    check_local_base(recipe)
    click.echo(
        f"{recipe.source}: valid; {counted(len(recipe.datasets), 'dataset')}, output in {recipe.output_dir}"
    )
