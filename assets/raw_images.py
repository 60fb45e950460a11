"""raw_images: every image file of the datasets, with its size and content hash."""

from typing import Any

from dagster import AssetExecutionContext, MaterializeResult

from assets.publishing import publish
from assets.steps import AssetStep
from pipeline.recipe import Recipe

DESCRIPTION = "Every image file of the datasets: where it lies, its size after orientation, its content hash."


def scanned(recipe: Recipe, context: AssetExecutionContext) -> MaterializeResult[Any]:
    """Every image; a local base model that cannot be used is told before any of them has been decoded."""
    from pipeline.models.resolve import check_local_base
    from pipeline.raw_images.stage import scan
    from pipeline.storage.tables import Tables

    check_local_base(recipe)
    result = scan(recipe, Tables(recipe.output_dir), log=context.log.info)
    return publish(recipe, "raw_images", result)


RAW_IMAGES = AssetStep("raw_images", DESCRIPTION, scanned, kinds=frozenset({"polars"}))
