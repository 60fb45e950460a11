"""aspect_buckets: the size each image is scaled and cropped to."""

from collections.abc import Iterator
from typing import Any

from dagster import AssetExecutionContext, MaterializeResult

from assets.isolation import require_isolated
from assets.publishing import picture_metadata, publish
from assets.steps import AssetStep
from pipeline.recipe import Recipe
from resources.failures import failures_stated

DESCRIPTION = (
    "The bucket of each image: how it is scaled and cropped, as a pure function of its size and the settings."
)


def bucketed(
    recipe: Recipe, context: AssetExecutionContext, validated: Any
) -> Iterator[MaterializeResult[Any]]:
    """The geometry of every sample."""
    from pipeline.bucket_report import write_bucket_report
    from pipeline.buckets import assign_buckets

    with failures_stated():
        require_isolated(context.run.run_id, recipe)
        result = assign_buckets(recipe, validated, log=context.log.info)
        pictures = write_bucket_report(recipe, result.table, log=context.log.info)
        output = publish(recipe, "aspect_buckets", result, pictures=picture_metadata(pictures))
    yield output


ASPECT_BUCKETS = AssetStep(
    "aspect_buckets",
    DESCRIPTION,
    bucketed,
    kinds=frozenset({"polars"}),
    reads={"validated": "validated_dataset"},
)
