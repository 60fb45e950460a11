"""evaluation: pictures drawn with each step of the run, their scores, and the step that they choose."""

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
from assets.step import run_step, stage_asset, stage_spec
from pipeline.recipe import Recipe
from resources.step_log import run_log

DESCRIPTION = (
    "Scores of pictures that are drawn with each step of the run and with the base model, and the step that "
    "they choose. Pictures and features are entries of the cache."
)


def build_evaluation(recipe: Recipe, location: Location) -> AssetsDefinition:
    """Build the asset `<recipe>/evaluation` with its checks."""
    spec = stage_spec(
        recipe,
        "evaluation",
        DESCRIPTION,
        kinds={"pytorch"},
    )

    @stage_asset(recipe, location, spec, launches=True)
    def evaluation(context: AssetExecutionContext) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        from pipeline.evaluation import checks
        from pipeline.evaluation.prepare import Request
        from pipeline.evaluation.stage import evaluate
        from pipeline.storage.tables import Tables

        def materialize() -> MaterializeResult[Any]:
            launch = location.launch(context, recipe)
            tables = Tables(recipe.output_dir, log=run_log(context))
            result = evaluate(recipe, Request(), tables, launch=launch, log=run_log(context))
            shown = picture_metadata(recipe.output_dir / "reports" / "evaluation")
            pictures = pictures_once(context, shown)
            return publish(recipe, "evaluation", result, log=run_log(context), pictures=pictures)

        yield from run_step(context, recipe, "evaluation", materialize, checks.run)

    return evaluation
