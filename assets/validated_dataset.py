"""validated_dataset: every image that decodes, with its caption."""

from collections.abc import Iterator
from typing import Any

from dagster import AssetExecutionContext, AssetIn, AssetsDefinition, MaterializeResult, asset

from assets.isolation import require_isolated
from assets.naming import asset_key, asset_settings
from assets.publishing import picture_metadata, publish
from pipeline.recipe import Recipe
from resources.failures import failures_stated

DESCRIPTION = "Each image decoded once, with its caption; what cannot be used is rejected with a reason."


def validated_dataset(recipe: Recipe) -> AssetsDefinition:
    """The images and captions that can be trained on."""
    ins = {"raw": AssetIn(key=asset_key(recipe, "raw_images"))}

    @asset(**asset_settings(recipe, "validated_dataset", DESCRIPTION), ins=ins, kinds={"polars"})
    def validated(context: AssetExecutionContext, raw: Any) -> Iterator[MaterializeResult[Any]]:
        import polars as pl

        from pipeline.dataset_report import write_dataset_report
        from pipeline.ingest.validate import validate
        from pipeline.tables import Tables

        with failures_stated():
            require_isolated(context.run.run_id, recipe)
            tables = Tables(recipe.output_dir)
            result = validate(recipe, raw, tables, log=context.log.info)
            rejected = pl.concat([tables.read_rejected("raw_images"), result.rejected])
            pictures = write_dataset_report(recipe, result.table, rejected, log=context.log.info)
            output = publish(recipe, "validated_dataset", result, pictures=picture_metadata(pictures))
        yield output

    return validated
