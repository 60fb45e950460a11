"""aspect_buckets: the size each image is scaled and cropped to."""

from typing import Any

from dagster import AssetExecutionContext, MaterializeResult

from assets.publishing import picture_metadata, publish
from assets.steps import AssetStep
from pipeline.recipe import Recipe

DESCRIPTION = (
    "The bucket of each image: how it is scaled and cropped, as a pure function of its size and the settings."
)


def bucketed(recipe: Recipe, context: AssetExecutionContext, validated: Any) -> MaterializeResult[Any]:
    """The geometry of every sample."""
    from pipeline.aspect_buckets.report import write_bucket_report
    from pipeline.aspect_buckets.stage import assign_buckets

    result = assign_buckets(recipe, validated, log=context.log.info)
    pictures = write_bucket_report(recipe, result.table, log=context.log.info)
    return publish(recipe, "aspect_buckets", result, pictures=picture_metadata(pictures))


ASPECT_BUCKETS = AssetStep(
    "aspect_buckets",
    DESCRIPTION,
    bucketed,
    kinds=frozenset({"polars"}),
    reads={"validated": "validated_dataset"},
)
