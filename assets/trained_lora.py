"""trained_lora: the LoRA, trained from the cache alone."""

from typing import Any

from dagster import (
    AssetExecutionContext,
    Field,
    Float,
    Int,
    MaterializeResult,
    MetadataValue,
    Noneable,
)

from assets.naming import LAUNCHER_RESOURCE
from assets.publishing import picture_metadata, publish, table_metadata
from assets.steps import AssetStep
from pipeline.recipe import Recipe, recipe_values
from resources.launcher import AccelerateLauncher

DESCRIPTION = (
    "The LoRA in three layouts, trained from the cache under accelerate; a finished, unchanged run is kept."
)

STEPS = "Optimizer steps, in place of the recipe's steps or epochs; null: as the recipe says."


def trained(
    recipe: Recipe, context: AssetExecutionContext, latents: Any, text: Any
) -> MaterializeResult[Any]:
    """The trained adapter; what it was trained on is its table."""
    from pipeline.trained_lora.stage import train_lora

    launcher: AccelerateLauncher = context.resources.launcher
    launch = launcher.bind(context, recipe.accelerate)
    given = context.op_execution_context.op_config
    result = train_lora(recipe, latents, text, launch=launch, log=context.log.info, overrides=given)
    pictures = recipe.output_dir / "reports" / "trained_lora"
    return publish(
        recipe,
        "trained_lora",
        result,
        pictures=picture_metadata(pictures),
        files=_files(recipe, result.report["run"]),
    )


def _files(recipe: Recipe, run: str) -> dict[str, MetadataValue[Any]]:
    """Where the LoRA, the run's checkpoints and its logs are, and which checkpoints are kept."""
    from pipeline.trained_lora.run_folder import RunLayout, checkpoint_list, run_folder

    folder = run_folder(recipe.output_dir, run)
    kept = table_metadata(checkpoint_list(RunLayout(folder)))
    places = {"lora": recipe.output_dir / "lora"}
    places |= {name: folder / name for name in ("checkpoints", "logs")}
    paths = {name: MetadataValue.path(str(path)) for name, path in places.items()}
    return {"checkpoint_list": kept, **paths}


def _run_settings(recipe: Recipe) -> dict[str, Field]:
    """What a run may be given in the launchpad or a `-c` file; what it isn't given is the recipe's."""
    own = recipe_values(recipe)
    return {
        "steps": Field(Noneable(Int), default_value=own["steps"], description=STEPS),
        "rank": Field(Int, default_value=own["rank"], description="Inner dimension of each adapter matrix."),
        "learning_rate": Field(Float, default_value=own["learning_rate"], description="After warm-up."),
        "seed": Field(
            Int, default_value=own["seed"], description="Decides noise, order and initial weights."
        ),
    }


TRAINED_LORA = AssetStep(
    "trained_lora",
    DESCRIPTION,
    trained,
    kinds=frozenset({"pytorch", "huggingface"}),
    reads={"latents": "vae_latents", "text": "text_embeddings"},
    resources=frozenset({LAUNCHER_RESOURCE}),
    settings=_run_settings,
)
