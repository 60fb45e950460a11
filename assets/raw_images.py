"""raw_images: every image file of the datasets, with its size and content hash."""

from collections.abc import Iterator
from typing import Any

from dagster import AssetCheckResult, AssetExecutionContext, MaterializeResult

from assets.isolation import isolation_result, require_isolated
from assets.publishing import publish
from assets.steps import AssetStep
from pipeline.checks.names import PATH_ISOLATION
from pipeline.recipe import Recipe
from resources.failures import failures_stated

DESCRIPTION = "Every image file of the datasets: where it lies, its size after orientation, its content hash."


def scanned(
    recipe: Recipe, context: AssetExecutionContext
) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
    """It speaks and fails before anything is written when paths are not isolated.

    A local base model that cannot be used is told here too, and not when all images have been decoded.
    """
    from pipeline.ingest.discover import scan
    from pipeline.model_source import require_possible_base
    from pipeline.tables import Tables

    with failures_stated():
        yield isolation_result(context.run.run_id, recipe)
        require_isolated(context.run.run_id, recipe)
        require_possible_base(recipe)
        result = scan(recipe, Tables(recipe.output_dir), log=context.log.info)
        output = publish(recipe, "raw_images", result)
    yield output


RAW_IMAGES = AssetStep(
    "raw_images", DESCRIPTION, scanned, kinds=frozenset({"polars"}), checks=[PATH_ISOLATION]
)
