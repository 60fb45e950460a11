"""`latentline validate`: check a recipe, its folders, its datasets and its base model."""

from __future__ import annotations

import click

from pipeline.cli.conventions import RECIPE, echo
from pipeline.errors import counted
from pipeline.models.preview_prompts import require_preview_prompts
from pipeline.models.reference_support import require_references
from pipeline.models.resolve import check_local_base
from pipeline.models.size_multiple import require_size_multiple
from pipeline.recipe import Recipe
from pipeline.recipe.isolation import require_isolation
from pipeline.recipe.load import require_own_output
from pipeline.trained_lora.start_file import require_start_file


@click.command(short_help="Check a recipe without computing anything.")
@click.argument("recipe", type=RECIPE)
def command(recipe: Recipe) -> None:
    """Check RECIPE, given by name or file: its keys, folders, datasets, and base model if it is local.

    Nothing is downloaded.
    """
    from pipeline.raw_images.walk import require_readable  # imports Polars, which only valid recipes need

    check_settings(recipe)
    for dataset in recipe.datasets:
        require_readable(dataset, max_file_bytes=recipe.checks.max_file_bytes)
    datasets = counted(len(recipe.datasets), "dataset")
    echo(f"{recipe.source}: valid; {datasets}, output in {recipe.registered_output}")


def check_settings(recipe: Recipe) -> None:
    """Run the checks that a schema cannot express: on paths, other recipes, a local model and `start_from`.

    Raises:
        PathIsolationError: Two of the recipe's paths overlap, or a run would replace its own input.
        RecipeError: Another recipe has the same output_dir, or a bucket edge, a preview prompt or the
            references do not suit the model.
        ModelError: The local base model cannot be used.
        TrainingError: The LoRA in `start_from` cannot be used.
    """
    require_isolation(recipe)
    require_own_output(recipe)
    require_size_multiple([recipe])
    check_local_base(recipe)
    require_preview_prompts(recipe)
    require_references(recipe)
    require_start_file(recipe)
