"""raw_images: every image file of the datasets, with its size and content hash."""

from collections.abc import Iterator
from typing import Any

from dagster import (
    AssetCheckResult,
    AssetCheckSpec,
    AssetExecutionContext,
    AssetsDefinition,
    MaterializeResult,
    asset,
)

from assets.isolation import isolation_result, require_isolated
from assets.naming import asset_key, asset_settings
from assets.publishing import publish
from pipeline.checks.names import PATH_ISOLATION
from pipeline.recipe import Recipe
from resources.failures import failures_stated

DESCRIPTION = "Every image file of the datasets: where it lies, its size after orientation, its content hash."


def raw_images(recipe: Recipe) -> AssetsDefinition:
    """The first asset; it speaks and fails before anything is written when paths are not isolated."""
    key = asset_key(recipe, "raw_images")
    isolation = AssetCheckSpec(
        PATH_ISOLATION.name, asset=key, description=PATH_ISOLATION.explained, blocking=True
    )

    @asset(**asset_settings(recipe, "raw_images", DESCRIPTION), check_specs=[isolation], kinds={"polars"})
    def scanned(context: AssetExecutionContext) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        from pipeline.ingest.discover import scan
        from pipeline.tables import Tables

        with failures_stated():
            yield isolation_result(context.run.run_id, recipe)
            require_isolated(context.run.run_id, recipe)
            result = scan(recipe, Tables(recipe.output_dir), log=context.log.info)
            output = publish(recipe, "raw_images", result)
        yield output

    return scanned
