"""diagnosis: which captions do not fit their images, by the base model's loss before training."""

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
    "How well each image fits its own caption and other captions, by the loss of the base model. "
    "The losses are entries of the cache."
)


def build_diagnosis(recipe: Recipe, location: Location) -> AssetsDefinition:
    """Build the asset `<recipe>/diagnosis` with its checks."""
    spec = stage_spec(
        recipe,
        "diagnosis",
        DESCRIPTION,
        kinds={"pytorch"},
        # The keys of latents and texts do not contain the denoiser, which measures the losses.
        deps=[base_model(recipe).key],
    )

    @stage_asset(
        recipe, location, spec, inputs={"latents": "vae_latents", "text": "text_embeddings"}, launches=True
    )
    def diagnosis(
        context: AssetExecutionContext, latents: Any, text: Any
    ) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        from pipeline.diagnosis import checks
        from pipeline.diagnosis.stage import diagnose
        from pipeline.storage.tables import Tables

        def materialize() -> MaterializeResult[Any]:
            launch = location.launch(context, recipe)
            tables = Tables(recipe.output_dir, log=run_log(context))
            result = diagnose(recipe, latents, text, tables, launch=launch, log=run_log(context))
            shown = picture_metadata(recipe.output_dir / "reports" / "diagnosis")
            pictures = pictures_once(context, shown)
            return publish(recipe, "diagnosis", result, log=run_log(context), pictures=pictures)

        yield from run_step(context, recipe, "diagnosis", materialize, checks.run)

    return diagnosis
