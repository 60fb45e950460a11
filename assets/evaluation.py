"""evaluation: pictures drawn with each step of the run, their scores, and the step that they choose."""

from collections.abc import Iterator
from typing import Any

from dagster import (
    AssetCheckResult,
    AssetExecutionContext,
    AssetsDefinition,
    MaterializeResult,
    multi_asset,
)

from assets.checks import check_specs
from assets.metadata import picture_metadata, pictures_once, publish
from assets.step import run_step, table_spec
from pipeline.recipe import Recipe
from resources.gpu_pool import in_pool
from resources.local_launcher import AccelerateLauncher
from resources.step_log import run_log
from resources.step_names import step_name
from resources.tables import ASSET

DESCRIPTION = (
    "Scores of pictures that are drawn with each step of the run and with the base model, and the step that "
    "they choose. Pictures and features are entries of the cache."
)


def build_evaluation(recipe: Recipe, *, pool: str) -> AssetsDefinition:
    """Build the asset `<recipe>/evaluation` with its checks; child processes need a place in `pool`."""

    @multi_asset(
        name=step_name(recipe.name, "evaluation"),
        op_tags={ASSET: "evaluation"},
        specs=[table_spec(recipe, "evaluation", description=DESCRIPTION, kinds={"pytorch"})],
        check_specs=check_specs(recipe, "evaluation"),
        can_subset=True,
    )
    def evaluation(
        context: AssetExecutionContext, launcher: AccelerateLauncher
    ) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        from pipeline.evaluation import checks
        from pipeline.evaluation.prepare import Request
        from pipeline.evaluation.stage import evaluate
        from pipeline.storage.tables import Tables

        def materialize() -> MaterializeResult[Any]:
            launch = in_pool(context, pool, launcher.bind(context, recipe.accelerate))
            tables = Tables(recipe.output_dir, log=run_log(context))
            result = evaluate(recipe, Request(), tables, launch=launch, log=run_log(context))
            shown = picture_metadata(recipe.output_dir / "reports" / "evaluation")
            pictures = pictures_once(context, shown)
            return publish(recipe, "evaluation", result, log=run_log(context), pictures=pictures)

        yield from run_step(context, recipe, "evaluation", materialize, checks.run)

    return evaluation
