"""The graph of one recipe: its assets, checks, jobs, schedule and sensor."""

from dagster import AssetsDefinition, AssetSelection, Definitions, define_asset_job

from assets.aspect_buckets import build_aspect_buckets
from assets.automation import dataset_sensor, recache_schedule
from assets.names import DEFAULT_RUN_CONFIG, RECIPE_TAG, asset_key
from assets.raw_images import build_raw_images
from assets.text_embeddings import build_text_embeddings
from assets.trained_lora import build_trained_lora
from assets.vae_latents import build_vae_latents
from assets.validated_dataset import build_validated_dataset
from pipeline.recipe import Recipe

CPU_ASSETS = (build_raw_images, build_validated_dataset, build_aspect_buckets)
"""Builders of the assets before the cache."""

GPU_ASSETS = (build_vae_latents, build_text_embeddings, build_trained_lora)
"""Builders of the assets whose steps may load a model."""


def recipe_assets(recipe: Recipe, *, pool: str) -> list[AssetsDefinition]:
    """Return the assets of `recipe`, from the first to the last."""
    cpu_assets = [build(recipe) for build in CPU_ASSETS]
    return [*cpu_assets, *(build(recipe, pool=pool) for build in GPU_ASSETS)]


def recipe_graph(recipe: Recipe, *, pool: str) -> Definitions:
    """Return every definition that follows from `recipe`, without the resources, which all recipes share.

    Args:
        recipe: The recipe.
        pool: Pool of the steps that may load a model.
    """
    every_asset = AssetSelection.groups(recipe.name)
    cache_job = define_asset_job(
        f"{recipe.name}_cache",
        selection=every_asset - AssetSelection.assets(asset_key(recipe, "trained_lora")),
        description="Brings tables, latents and text embeddings up to date.",
        tags={RECIPE_TAG: recipe.name},
        config=DEFAULT_RUN_CONFIG,
    )
    train_job = define_asset_job(
        f"{recipe.name}_train",
        selection=every_asset,
        description="Brings the cache up to date, then trains the LoRA.",
        tags={RECIPE_TAG: recipe.name},
        config=DEFAULT_RUN_CONFIG,
    )

    schedule = recache_schedule(recipe, cache_job.name)
    return Definitions(
        assets=recipe_assets(recipe, pool=pool),
        jobs=[cache_job, train_job],
        schedules=[schedule] if schedule is not None else [],
        sensors=[dataset_sensor(recipe, cache_job.name)],
    )
