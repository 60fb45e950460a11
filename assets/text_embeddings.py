"""text_embeddings: the store entry of each caption's embedding."""

from collections.abc import Iterator
from typing import Any

from dagster import AssetExecutionContext, AssetIn, AssetsDefinition, MaterializeResult, asset

from assets.isolation import require_isolated
from assets.naming import asset_key, asset_settings
from assets.publishing import picture_metadata, publish
from pipeline.recipe import Recipe
from resources.failures import failures_stated
from resources.launcher import AccelerateLauncher

DESCRIPTION = (
    "Each caption's embedding in the store, each different caption once, and the empty one for dropout."
)


def text_embeddings(recipe: Recipe) -> AssetsDefinition:
    """The cached embeddings; a child process encodes what is missing, and none is started when nothing is."""
    ins = {"validated": AssetIn(key=asset_key(recipe, "validated_dataset"))}

    @asset(**asset_settings(recipe, "text_embeddings", DESCRIPTION), ins=ins, kinds={"pytorch"})
    def cached(
        context: AssetExecutionContext, launcher: AccelerateLauncher, validated: Any
    ) -> Iterator[MaterializeResult[Any]]:
        from pipeline.caption_report import write_caption_report
        from pipeline.encode.text import cache_text
        from pipeline.tables import Tables

        with failures_stated():
            require_isolated(context.run.run_id, recipe)
            launch = launcher.bind(context, recipe.accelerate)
            tables = Tables(recipe.output_dir)
            result = cache_text(recipe, validated, tables, launch=launch, log=context.log.info)
            pictures = picture_metadata(write_caption_report(recipe, result.table))
            output = publish(recipe, "text_embeddings", result, pictures=pictures)
        yield output

    return cached
