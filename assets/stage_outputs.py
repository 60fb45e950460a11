"""Output folders at an address: each step fetches what it needs, and uploads its results."""

from contextlib import AbstractContextManager

from dagster import AssetExecutionContext

from assets.run_log import run_log
from pipeline.recipe import Recipe


def stage_outputs(context: AssetExecutionContext, recipe: Recipe, asset: str) -> AbstractContextManager[None]:
    """Fetch what a stage and its checks read before the body, and upload their results after it.

    Call it after path isolation has been checked. See `pipeline.outputs.stage_files.stage_files`.
    """
    from pipeline.outputs.folder import outputs_of
    from pipeline.outputs.stage_files import stage_files

    log = run_log(context)
    return stage_files(outputs_of(recipe, log), asset, checks_only=not context.selected_asset_keys, log=log)
