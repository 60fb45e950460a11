"""raw_images: every image file of the datasets, with its size and content hash."""

from collections.abc import Iterator, Mapping
from typing import Any

from dagster import AssetCheckResult, AssetExecutionContext, AssetsDefinition, MaterializeResult

from assets.location import Location
from assets.metadata import publish
from assets.sources import dataset_keys
from assets.step import run_step, stage_asset, stage_spec
from pipeline.recipe import Recipe, with_overrides
from resources.step_log import run_log
from resources.step_names import step_name

DESCRIPTION = "Every image file of the datasets: its path, its size after orientation and its content hash."


def build_raw_images(recipe: Recipe, location: Location) -> AssetsDefinition:
    """Build the asset `<recipe>/raw_images` with its checks."""
    spec = stage_spec(
        recipe,
        "raw_images",
        DESCRIPTION,
        kinds={"polars"},
        deps=dataset_keys(recipe),
    )

    @stage_asset(recipe, location, spec)
    def raw_images(context: AssetExecutionContext) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        from pipeline.raw_images import checks
        from pipeline.raw_images.stage import scan
        from pipeline.storage.tables import Tables

        def materialize() -> MaterializeResult[Any]:
            _require_usable(recipe, context.run.run_config)
            result = scan(recipe, Tables(recipe.output_dir, log=run_log(context)), log=run_log(context))
            return publish(recipe, "raw_images", result, log=run_log(context))

        yield from run_step(context, recipe, "raw_images", materialize, checks.run)

    return raw_images


def _require_usable(recipe: Recipe, run_config: Mapping[str, Any]) -> None:
    """Raise for mistakes in settings and paths, before an image is read."""
    from pipeline.models.recipe_support import (
        require_preview_prompts,
        require_references,
        require_training_settings,
    )
    from pipeline.models.resolve import check_local_base
    from pipeline.models.training_adapter import check_training_adapter
    from pipeline.raw_images.walk import require_folders
    from pipeline.trained_lora.context_file import require_context_file
    from pipeline.trained_lora.start_file import require_start_file
    from pipeline.trained_lora.supported_settings import require_supported_settings

    check_local_base(recipe)
    check_training_adapter(recipe)
    require_preview_prompts(recipe)
    require_references(recipe)
    require_training_settings(recipe)
    trained = with_overrides(recipe, training_overrides(run_config, recipe))
    require_supported_settings(trained)
    require_start_file(trained)
    require_context_file(trained)
    for dataset in recipe.datasets:
        require_folders(dataset, packed=recipe.packed.get(dataset.name))


def training_overrides(run_config: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return the configuration of trained_lora in a run, which may change the rank; see `OVERRIDABLE`."""
    steps = run_config.get("ops", {})
    overrides = steps.get(step_name(recipe.name, "trained_lora"), {}).get("config", {})

    # Dagster resolves {env: NAME} for trained_lora, which validates all of them again.
    return {name: value for name, value in overrides.items() if not isinstance(value, Mapping)}
