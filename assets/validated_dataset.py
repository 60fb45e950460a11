"""validated_dataset: every image that decodes, with its caption."""

from collections.abc import Iterator
from typing import Any

from dagster import (
    AssetCheckResult,
    AssetExecutionContext,
    AssetIn,
    AssetsDefinition,
    MaterializeResult,
    MetadataValue,
    multi_asset,
)

from assets.checks import check_specs
from assets.metadata import picture_metadata, pictures_once, publish
from assets.names import asset_key
from assets.step import run_step, table_spec
from pipeline.recipe import Recipe
from resources.step_log import run_log
from resources.step_names import step_name
from resources.tables import ASSET

DESCRIPTION = "Images that decode, with their captions; unusable ones are rejected with a reason."


def build_validated_dataset(recipe: Recipe) -> AssetsDefinition:
    """Build the asset `<recipe>/validated_dataset` with its checks."""

    @multi_asset(
        name=step_name(recipe.name, "validated_dataset"),
        op_tags={ASSET: "validated_dataset"},
        specs=[table_spec(recipe, "validated_dataset", description=DESCRIPTION, kinds={"polars"})],
        ins={"raw": AssetIn(asset_key(recipe, "raw_images"))},
        check_specs=check_specs(recipe, "validated_dataset"),
        can_subset=True,
    )
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
            result = validate(recipe, raw, tables, log=run_log(context))
            rejected = pl.concat([tables.read_rejected("raw_images"), result.rejected])
            folder = write_dataset_report(recipe, result.table, rejected, log=run_log(context))
            page = write_dataset_page(recipe, result.table, rejected, log=run_log(context))
            pictures = pictures_once(context, picture_metadata(folder))
            files = {"dataset_page": MetadataValue.path(str(page))}
            return publish(
                recipe, "validated_dataset", result, log=run_log(context), pictures=pictures, files=files
            )

        yield from run_step(context, recipe, "validated_dataset", materialize, checks.run)

    return validated_dataset
