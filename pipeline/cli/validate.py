"""`latentline validate`: check a recipe, its folders, its datasets and its base model; or the deployment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from io import StringIO
from typing import Any

import click
from ruamel.yaml import YAML

from pipeline.cli.conventions import RECIPE_TO_CHECK, echo
from pipeline.cli.json_output import give
from pipeline.errors import LatentlineError, counted
from pipeline.escaping import without_secrets
from pipeline.models.recipe_support import (
    require_preview_prompts,
    require_references,
    require_training_settings,
)
from pipeline.models.resolve import check_local_base
from pipeline.models.size_multiple import local_family, require_size_multiple
from pipeline.models.training_adapter import check_training_adapter
from pipeline.recipe import Recipe
from pipeline.recipe.deployment import (
    DEPLOYMENT_VARIABLE,
    Deployment,
    deployment_values,
    load_deployment,
)
from pipeline.recipe.errors import combined_error
from pipeline.recipe.isolation import require_isolation
from pipeline.recipe.load import require_own_output
from pipeline.trained_lora.context_file import require_context_file
from pipeline.trained_lora.start_file import require_start_file
from pipeline.trained_lora.supported_settings import require_supported_settings, training_warnings


@click.command(short_help="Check a recipe, or the deployment settings.")
@click.argument("recipe", type=RECIPE_TO_CHECK, required=False)
@click.option(
    "--deployment",
    is_flag=True,
    help="Print all deployment settings, including defaults. RECIPE may then be omitted.",
)
@click.pass_context
def command(context: click.Context, recipe: Recipe | None, deployment: bool) -> None:
    """Check the keys and values of RECIPE, its folders and datasets, and its base model.

    All mistakes in keys and values are reported at once, each with its line and a fix. Images are not
    decoded; for that, use plan. Nothing is downloaded, so a base model from the Hub is checked only if its
    files are on this machine. If a folder of the project has its owner's name, the Hub is asked whether the
    repository exists, because the name may be a local path with a typo.

    The deployment settings, in the file that LATENTLINE_DEPLOYMENT names, are checked too. They define where
    jobs run, for example on a cluster.
    """
    if recipe is None and not deployment:
        raise click.MissingParameter(ctx=context, param=context.command.params[0], param_hint="'RECIPE'")
    result = {} if recipe is None else _check(recipe)
    if deployment:
        settings = load_deployment()
        echo(_deployment_text(settings))
        result["deployment"] = deployment_values(settings)
    give(result)


def _check(recipe: Recipe) -> dict[str, Any]:
    from pipeline.raw_images.walk import require_readable  # imports Polars, which only valid recipes need

    limit = recipe.checks.max_file_bytes
    check_settings(
        recipe,
        *(
            partial(require_readable, each, packed=recipe.packed.get(each.name), max_file_bytes=limit)
            for each in recipe.datasets
        ),
    )
    datasets = counted(len(recipe.datasets), "dataset")
    echo(f"{recipe.source}: valid; {datasets}, output in {recipe.registered_output}")
    family = local_family(recipe)
    warnings = training_warnings(recipe, family) if family is not None else ()
    for warning in warnings:
        echo(f"warning: {warning}")
    return {
        "recipe": recipe.name,
        "file": recipe.source,
        "datasets": {
            each.name: without_secrets(str(recipe.packed.get(each.name, each.root)))
            for each in recipe.datasets
        },
        "output_dir": recipe.registered_output,
        "warnings": [*warnings],
    }


def _deployment_text(deployment: Deployment) -> str:
    origin = deployment.source or f"{DEPLOYMENT_VARIABLE} is not set; these are the defaults"
    text = StringIO()
    yaml = YAML()
    yaml.dump(deployment_values(deployment), text)
    return f"# {origin}\n{text.getvalue().rstrip()}"


def check_settings(recipe: Recipe, *more_checks: Callable[[], None]) -> None:
    """Run the checks that a schema cannot express: paths, other recipes, a local model and `start_from`.

    Raises:
        LatentlineError: The error of the only check that failed, or one RecipeError with all of them.
    """
    errors: list[LatentlineError] = []
    checks = (
        require_isolation,
        require_own_output,
        _require_size_multiple,
        check_local_base,
        check_training_adapter,
        require_preview_prompts,
        require_references,
        require_training_settings,
        require_supported_settings,
        require_start_file,
        require_context_file,
    )
    for check in (*(partial(each, recipe) for each in checks), *more_checks):
        try:
            check()
        except LatentlineError as err:
            errors.append(err)
    if errors:
        raise combined_error(errors, file=str(recipe.source))


def _require_size_multiple(recipe: Recipe) -> None:
    require_size_multiple([recipe])
