"""trained_lora: the LoRA, trained from the cache alone."""

from collections.abc import Iterator
from typing import Any

from dagster import AssetExecutionContext, AssetIn, AssetsDefinition, MaterializeResult, asset

from assets.isolation import require_isolated
from assets.naming import asset_key, asset_settings
from assets.publishing import publish
from pipeline.recipe import Recipe
from resources.failures import failures_stated
from resources.launcher import AccelerateLauncher

DESCRIPTION = (
    "The LoRA in three layouts, trained from the cache under accelerate; a finished, unchanged run is kept."
)


def trained_lora(recipe: Recipe) -> AssetsDefinition:
    """The trained adapter; what it was trained on is its table."""
    names = {"latents": "vae_latents", "text": "text_embeddings"}
    ins = {name: AssetIn(key=asset_key(recipe, upstream)) for name, upstream in names.items()}

    @asset(**asset_settings(recipe, "trained_lora", DESCRIPTION), ins=ins, kinds={"pytorch", "huggingface"})
    def trained(
        context: AssetExecutionContext, launcher: AccelerateLauncher, latents: Any, text: Any
    ) -> Iterator[MaterializeResult[Any]]:
        from pipeline.training.run import train_lora

        with failures_stated():
            require_isolated(context.run.run_id, recipe)
            launch = launcher.bind(context, recipe.accelerate)
            result = train_lora(recipe, latents, text, launch=launch, log=context.log.info)
            pictures = recipe.output_dir / "reports" / "trained_lora"
            output = publish(recipe, "trained_lora", result, pictures=pictures)
        yield output

    return trained
