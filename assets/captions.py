"""captions: what a vision-language model wrote of the images without a caption."""

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
from assets.sources import captioning_models
from assets.step import run_step, stage_asset, stage_spec
from pipeline.recipe import Recipe
from resources.step_log import run_log

DESCRIPTION = (
    "Captions that a vision-language model wrote for images without one. They are entries of the cache; the "
    "dataset is not changed."
)


def build_captions(recipe: Recipe, location: Location) -> AssetsDefinition:
    """Build the asset `<recipe>/captions` with its checks."""
    spec = stage_spec(
        recipe,
        "captions",
        DESCRIPTION,
        kinds={"pytorch"},
        deps=[model.key for model in captioning_models(recipe)],
    )

    @stage_asset(recipe, location, spec, inputs={"raw": "raw_images"}, launches=True)
    def captions(
        context: AssetExecutionContext, raw: Any
    ) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        from pipeline.captions import checks
        from pipeline.captions.stage import caption_images
        from pipeline.storage.tables import Tables

        def materialize() -> MaterializeResult[Any]:
            launch = location.launch(context, recipe)
            tables = Tables(recipe.output_dir, log=run_log(context))
            result = caption_images(recipe, raw, tables, launch=launch, log=run_log(context))
            shown = picture_metadata(recipe.output_dir / "reports" / "captions")
            pictures = pictures_once(context, shown)
            return publish(recipe, "captions", result, log=run_log(context), pictures=pictures)

        yield from run_step(context, recipe, "captions", materialize, checks.run)

    return captions
