"""validated_dataset: every image that decodes, with its caption."""

from collections.abc import Iterator
from typing import Any

from dagster import (
    AssetCheckResult,
    AssetExecutionContext,
    AssetsDefinition,
    MaterializeResult,
)

from assets.location import Location
from assets.metadata import output_file, publish
from assets.names import asset_key
from assets.pictures import picture_metadata, pictures_once
from assets.step import run_step, stage_asset, stage_spec
from pipeline.recipe import Recipe
from resources.step_log import run_log

DESCRIPTION = "Images that decode, with their captions; unusable ones are rejected with a reason."


def build_validated_dataset(recipe: Recipe, location: Location) -> AssetsDefinition:
    """Build the asset `<recipe>/validated_dataset` with its checks."""
    spec = stage_spec(
        recipe,
        "validated_dataset",
        DESCRIPTION,
        kinds={"polars"},
        # Not an input, because the function's parameters cannot depend on the recipe.
        deps=[asset_key(recipe, "captions")] if recipe.has_model_captions else [],
    )

    @stage_asset(recipe, location, spec, inputs={"raw": "raw_images"})
    def validated_dataset(
        context: AssetExecutionContext, raw: Any
    ) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        import polars as pl

        from pipeline.storage.tables import Tables
        from pipeline.validated_dataset import checks
        from pipeline.validated_dataset.dataset_page import write_dataset_page
        from pipeline.validated_dataset.report import write_dataset_report
        from pipeline.validated_dataset.stage import validate

        def materialize() -> MaterializeResult[Any]:
            tables = Tables(recipe.output_dir, log=run_log(context))
            written = tables.read("captions") if recipe.has_model_captions else None
            result = validate(recipe, raw, tables, log=run_log(context), written=written)
            rejected = pl.concat([tables.read_rejected("raw_images"), result.rejected])
            folder = write_dataset_report(recipe, result.table, rejected, log=run_log(context))
            page = write_dataset_page(recipe, result.table, rejected, log=run_log(context))
            pictures = pictures_once(context, picture_metadata(folder))
            files = {"dataset_page": output_file(recipe, page)}
            return publish(
                recipe, "validated_dataset", result, log=run_log(context), pictures=pictures, files=files
            )

        yield from run_step(context, recipe, "validated_dataset", materialize, checks.run)

    return validated_dataset
