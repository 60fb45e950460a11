"""text_embeddings: the cache entry of each distinct caption's embedding."""

from collections.abc import Iterator
from typing import Any

from dagster import (
    AssetCheckResult,
    AssetExecutionContext,
    AssetIn,
    AssetsDefinition,
    MaterializeResult,
    multi_asset,
)

from assets.checks import check_specs
from assets.metadata import picture_metadata, pictures_once, publish
from assets.names import asset_key
from assets.sources import model_key
from assets.step import run_step, table_spec
from pipeline.recipe import Recipe
from resources.gpu_pool import in_pool
from resources.local_launcher import AccelerateLauncher
from resources.step_log import run_log
from resources.step_names import step_name
from resources.tables import ASSET

DESCRIPTION = (
    "The cache entry of each caption's embedding: one for each distinct caption, and one for the empty "
    "caption of caption dropout."
)


def build_text_embeddings(recipe: Recipe, *, pool: str) -> AssetsDefinition:
    """Build the asset `<recipe>/text_embeddings` with its checks; child processes need a place in `pool`."""

    @multi_asset(
        name=step_name(recipe.name, "text_embeddings"),
        op_tags={ASSET: "text_embeddings"},
        specs=[
            table_spec(
                recipe,
                "text_embeddings",
                description=DESCRIPTION,
                kinds={"pytorch"},
                deps=[model_key(recipe)],
            )
        ],
        ins={"validated": AssetIn(asset_key(recipe, "validated_dataset"))},
        check_specs=check_specs(recipe, "text_embeddings"),
        can_subset=True,
    )
    def text_embeddings(
        context: AssetExecutionContext, launcher: AccelerateLauncher, validated: Any
    ) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        from pipeline.storage.tables import Tables
        from pipeline.text_embeddings import checks
        from pipeline.text_embeddings.report import write_caption_report
        from pipeline.text_embeddings.stage import cache_text

        def materialize() -> MaterializeResult[Any]:
            launch = in_pool(context, pool, launcher.bind(context, recipe.accelerate))
            tables = Tables(recipe.output_dir, log=run_log(context))
            result = cache_text(
                recipe,
                validated,
                tables,
                launch=launch,
                log=run_log(context),
                seal_packs=launcher.seal_packs,
            )
            shown = picture_metadata(write_caption_report(recipe, result.table))
            pictures = pictures_once(context, shown)
            return publish(recipe, "text_embeddings", result, log=run_log(context), pictures=pictures)

        yield from run_step(context, recipe, "text_embeddings", materialize, checks.run)

    return text_embeddings
