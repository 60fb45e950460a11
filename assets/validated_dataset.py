"""validated_dataset: every image that decodes, with its caption."""

from typing import Any

from dagster import AssetExecutionContext, MaterializeResult

from assets.publishing import picture_metadata, publish
from assets.steps import AssetStep
from pipeline.recipe import Recipe

DESCRIPTION = "Each image decoded once, with its caption; what cannot be used is rejected with a reason."


def validated(recipe: Recipe, context: AssetExecutionContext, raw: Any) -> MaterializeResult[Any]:
    """The images and captions that can be trained on."""
    import polars as pl

    from pipeline.storage.tables import Tables
    from pipeline.validated_dataset.report import write_dataset_report
    from pipeline.validated_dataset.stage import validate

    tables = Tables(recipe.output_dir)
    result = validate(recipe, raw, tables, log=context.log.info)
    rejected = pl.concat([tables.read_rejected("raw_images"), result.rejected])
    pictures = write_dataset_report(recipe, result.table, rejected, log=context.log.info)
    return publish(recipe, "validated_dataset", result, pictures=picture_metadata(pictures))


VALIDATED_DATASET = AssetStep(
    "validated_dataset", DESCRIPTION, validated, kinds=frozenset({"polars"}), reads={"raw": "raw_images"}
)
