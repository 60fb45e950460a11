"""text_embeddings: the store entry of each caption's embedding."""

from typing import Any

from dagster import AssetExecutionContext, MaterializeResult

from assets.naming import LAUNCHER_RESOURCE
from assets.publishing import picture_metadata, publish
from assets.steps import AssetStep
from pipeline.recipe import Recipe
from resources.launcher import AccelerateLauncher

DESCRIPTION = (
    "Each caption's embedding in the store, each different caption once, and the empty one for dropout."
)


def cached(recipe: Recipe, context: AssetExecutionContext, validated: Any) -> MaterializeResult[Any]:
    """The cached embeddings; a child process encodes what is missing, and none is started when nothing is."""
    from pipeline.storage.tables import Tables
    from pipeline.text_embeddings.report import write_caption_report
    from pipeline.text_embeddings.stage import cache_text

    launcher: AccelerateLauncher = context.resources.launcher
    launch = launcher.bind(context, recipe.accelerate)
    tables = Tables(recipe.output_dir)
    result = cache_text(recipe, validated, tables, launch=launch, log=context.log.info)
    pictures = picture_metadata(write_caption_report(recipe, result.table))
    return publish(recipe, "text_embeddings", result, pictures=pictures)


TEXT_EMBEDDINGS = AssetStep(
    "text_embeddings",
    DESCRIPTION,
    cached,
    kinds=frozenset({"pytorch"}),
    reads={"validated": "validated_dataset"},
    resources=frozenset({LAUNCHER_RESOURCE}),
)
