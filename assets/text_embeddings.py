"""text_embeddings: the cache entry of each distinct caption's embedding."""

from collections.abc import Iterator
from typing import Any

from dagster import (
    AssetCheckResult,
    AssetExecutionContext,
    AssetsDefinition,
    MaterializeResult,
)

from assets.location import Location
from assets.metadata import publish
from assets.pictures import picture_metadata, pictures_once
from assets.sources import base_model
from assets.step import run_step, stage_asset, stage_spec
from pipeline.recipe import Recipe
from resources.step_log import run_log

DESCRIPTION = (
    "The cache entry of each caption's embedding: one for each distinct caption, and one for the empty "
    "caption of caption dropout."
)


def build_text_embeddings(recipe: Recipe, location: Location) -> AssetsDefinition:
    """Build the asset `<recipe>/text_embeddings` with its checks."""
    spec = stage_spec(
        recipe,
        "text_embeddings",
        DESCRIPTION,
        kinds={"pytorch"},
        deps=[base_model(recipe).key],
    )

    @stage_asset(recipe, location, spec, inputs={"validated": "validated_dataset"}, launches=True)
    def text_embeddings(
        context: AssetExecutionContext, validated: Any
    ) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        from pipeline.storage.tables import Tables
        from pipeline.text_embeddings import checks
        from pipeline.text_embeddings.report import write_caption_report
        from pipeline.text_embeddings.stage import cache_text

        def materialize() -> MaterializeResult[Any]:
            launch = location.launch(context, recipe)
            tables = Tables(recipe.output_dir, log=run_log(context))
            result = cache_text(
                recipe,
                validated,
                tables,
                launch=launch,
                log=run_log(context),
                seal_packs=location.launcher_of(context).seal_packs,
            )
            shown = picture_metadata(write_caption_report(recipe, result.table))
            pictures = pictures_once(context, shown)
            return publish(recipe, "text_embeddings", result, log=run_log(context), pictures=pictures)

        yield from run_step(context, recipe, "text_embeddings", materialize, checks.run)

    return text_embeddings
