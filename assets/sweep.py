"""sweep: variants of the recipe with other settings, and which of them is best."""

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
from assets.names import asset_key
from assets.pictures import picture_metadata, pictures_once
from assets.step import run_step, stage_asset, stage_spec
from pipeline.recipe import Recipe
from resources.step_log import run_log

DESCRIPTION = (
    "Variants of the recipe, trained by successive halving and judged with the same pictures or images. Each "
    "has the run that a recipe with its settings has."
)


def build_sweep(recipe: Recipe, location: Location) -> AssetsDefinition:
    """Build the asset `<recipe>/sweep` with its checks."""
    spec = stage_spec(
        recipe,
        "sweep",
        DESCRIPTION,
        kinds={"pytorch"},
        # The sweep does not read it. A run of the job first trains what the recipe declares.
        deps=[asset_key(recipe, "trained_lora")],
    )

    @stage_asset(
        recipe, location, spec, inputs={"latents": "vae_latents", "text": "text_embeddings"}, launches=True
    )
    def sweep_asset(
        context: AssetExecutionContext, latents: Any, text: Any
    ) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        from pipeline.sweep import checks
        from pipeline.sweep.concurrency import Concurrency
        from pipeline.sweep.stage import sweep

        def materialize() -> MaterializeResult[Any]:
            launch = location.launch(context, recipe)
            number = location.launcher_of(context).concurrent_trainings
            concurrency = Concurrency(number, launch.place)
            result = sweep(
                recipe, latents, text, launch=launch, log=run_log(context), concurrency=concurrency
            )
            shown = picture_metadata(recipe.output_dir / "reports" / "sweep")
            pictures = pictures_once(context, shown)
            return publish(recipe, "sweep", result, log=run_log(context), pictures=pictures)

        yield from run_step(context, recipe, "sweep", materialize, checks.run)

    return sweep_asset
