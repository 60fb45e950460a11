"""aspect_buckets: the size each image is scaled and cropped to."""

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
from assets.pictures import picture_metadata, pictures_once
from assets.step import run_step, stage_asset, stage_spec
from pipeline.recipe import Recipe
from resources.step_log import run_log

DESCRIPTION = (
    "The bucket of each image: how it is scaled and cropped, as a pure function of its size and the settings."
)


def build_aspect_buckets(recipe: Recipe, location: Location) -> AssetsDefinition:
    """Build the asset `<recipe>/aspect_buckets` with its checks."""
    spec = stage_spec(
        recipe,
        "aspect_buckets",
        DESCRIPTION,
        kinds={"polars"},
    )

    @stage_asset(recipe, location, spec, inputs={"validated": "validated_dataset"})
    def aspect_buckets(
        context: AssetExecutionContext, validated: Any
    ) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        import polars as pl

        from pipeline.aspect_buckets import checks
        from pipeline.aspect_buckets.report import write_bucket_report
        from pipeline.aspect_buckets.stage import assign_buckets
        from pipeline.storage.tables import Tables
        from pipeline.validated_dataset.dataset_page import write_dataset_page

        def materialize() -> MaterializeResult[Any]:
            result = assign_buckets(recipe, validated, log=run_log(context))
            folder = write_bucket_report(recipe, result.table, log=run_log(context))

            tables = Tables(recipe.output_dir)
            earlier = [tables.read_rejected(stage) for stage in ("raw_images", "validated_dataset")]
            rejected = pl.concat(earlier)
            page = write_dataset_page(recipe, validated, rejected, placed=result, log=run_log(context))
            pictures = pictures_once(context, picture_metadata(folder))
            files = {"dataset_page": output_file(recipe, page)}
            return publish(
                recipe, "aspect_buckets", result, log=run_log(context), pictures=pictures, files=files
            )

        yield from run_step(context, recipe, "aspect_buckets", materialize, checks.run)

    return aspect_buckets
