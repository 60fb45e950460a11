"""trained_lora: the LoRA, trained from the cache alone."""

from collections.abc import Iterator
from typing import Any

from dagster import (
    AssetCheckResult,
    AssetExecutionContext,
    AssetsDefinition,
    Field,
    Float,
    Int,
    MaterializeResult,
    MetadataValue,
    Noneable,
    multi_asset,
)

from assets.checks import check_results, check_specs, path_isolation_results
from assets.live_training import observe_training
from assets.metadata import picture_metadata, publish, table_metadata
from assets.names import step_name
from assets.run_log import run_log
from assets.stage_outputs import stage_outputs
from assets.table_specs import TABLE, table_in, table_out
from pipeline.recipe import Recipe, recipe_values
from pipeline.reporting import tensorboard
from resources.failures import errors_as_failures
from resources.local_launcher import AccelerateLauncher

DESCRIPTION = (
    "The LoRA in three layouts, trained from the cache with accelerate. A finished run with the same inputs "
    "and settings is reused."
)


def build_trained_lora(recipe: Recipe, *, pool: str) -> AssetsDefinition:
    """Build the asset `<recipe>/trained_lora` with its checks."""

    @multi_asset(
        name=step_name(recipe, "trained_lora"),
        outs={
            TABLE: table_out(
                recipe, "trained_lora", description=DESCRIPTION, kinds={"pytorch", "huggingface"}
            )
        },
        ins={
            "latents": table_in(recipe, "vae_latents", reader="trained_lora"),
            "text": table_in(recipe, "text_embeddings", reader="trained_lora"),
        },
        check_specs=check_specs(recipe, "trained_lora"),
        can_subset=True,
        pool=pool,
        config_schema=_run_config(recipe),
    )
    def trained_lora(
        context: AssetExecutionContext, launcher: AccelerateLauncher, latents: Any, text: Any
    ) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        from pipeline.trained_lora.stage import train_lora

        with errors_as_failures():
            yield from path_isolation_results(context, recipe)
            with stage_outputs(context, recipe, "trained_lora"):
                if context.selected_asset_keys:
                    launch = launcher.bind(context, recipe.accelerate, observe_training(context, recipe))
                    overrides = context.op_execution_context.op_config
                    result = train_lora(
                        recipe, latents, text, launch=launch, log=run_log(context), overrides=overrides
                    )
                    pictures = picture_metadata(recipe.output_dir / "reports" / "trained_lora")
                    files = _file_metadata(recipe, result.report["run"])
                    yield publish(recipe, "trained_lora", result, pictures=pictures, files=files)

                yield from check_results(context, recipe, "trained_lora")

    return trained_lora


def _run_config(recipe: Recipe) -> dict[str, Field]:
    """Declare the settings that a run may override in the launchpad or a `-c` file."""
    values = recipe_values(recipe)
    return {
        "steps": Field(
            Noneable(Int),
            default_value=values["steps"],
            description="Number of optimizer steps. null uses the recipe's steps or epochs.",
        ),
        "rank": Field(
            Int, default_value=values["rank"], description="Inner dimension of each adapter matrix."
        ),
        "learning_rate": Field(
            Float, default_value=values["learning_rate"], description="Learning rate after warm-up."
        ),
        "seed": Field(
            Int,
            default_value=values["seed"],
            description="Seed of noise, sample order and initial weights.",
        ),
    }


def _file_metadata(recipe: Recipe, run: str) -> dict[str, MetadataValue[Any]]:
    """Return the checkpoints on disk, the paths of the LoRA and the logs, and a link to TensorBoard."""
    from pipeline.trained_lora.run_folder import RunLayout, checkpoint_list, run_folder

    folder = run_folder(recipe.output_dir, run)
    paths = {
        "lora": recipe.output_dir / "lora",
        "checkpoints": folder / "checkpoints",
        "logs": folder / "logs",
    }
    return {
        "tensorboard": MetadataValue.url(tensorboard.url(f"{recipe.name}/{run}")),
        "checkpoint_list": table_metadata(checkpoint_list(RunLayout(folder))),
        **{name: MetadataValue.path(str(path)) for name, path in paths.items()},
    }
