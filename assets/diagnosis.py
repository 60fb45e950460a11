"""diagnosis: which captions do not fit their images, by the base model's loss before training."""

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
from assets.step import run_step, table_spec
from pipeline.recipe import Recipe
from resources.gpu_pool import in_pool
from resources.local_launcher import AccelerateLauncher
from resources.step_log import run_log
from resources.step_names import step_name
from resources.tables import ASSET

DESCRIPTION = (
    "How well each image fits its own caption and captions of other images, by the loss of the base model. "
    "The losses are entries of the cache."
)


def build_diagnosis(recipe: Recipe, *, pool: str) -> AssetsDefinition:
    """Build the asset `<recipe>/diagnosis` with its checks; child processes need a place in `pool`."""

    @multi_asset(
        name=step_name(recipe.name, "diagnosis"),
        op_tags={ASSET: "diagnosis"},
        specs=[table_spec(recipe, "diagnosis", description=DESCRIPTION, kinds={"pytorch"})],
        ins={
            "latents": AssetIn(asset_key(recipe, "vae_latents")),
            "text": AssetIn(asset_key(recipe, "text_embeddings")),
        },
        check_specs=check_specs(recipe, "diagnosis"),
        can_subset=True,
    )
    def diagnosis(
        context: AssetExecutionContext, launcher: AccelerateLauncher, latents: Any, text: Any
    ) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        from pipeline.diagnosis import checks
        from pipeline.diagnosis.stage import diagnose
        from pipeline.storage.tables import Tables

        def materialize() -> MaterializeResult[Any]:
            launch = in_pool(context, pool, launcher.bind(context, recipe.accelerate))
            tables = Tables(recipe.output_dir, log=run_log(context))
            result = diagnose(recipe, latents, text, tables, launch=launch, log=run_log(context))
            shown = picture_metadata(recipe.output_dir / "reports" / "diagnosis")
            pictures = pictures_once(context, shown)
            return publish(recipe, "diagnosis", result, log=run_log(context), pictures=pictures)

        yield from run_step(context, recipe, "diagnosis", materialize, checks.run)

    return diagnosis
