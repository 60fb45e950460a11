"""The graph of one recipe: its assets, checks, jobs, schedule and sensor."""

from dagster import AssetSelection, Definitions, define_asset_job

from assets.aspect_buckets import build_aspect_buckets
from assets.automation import dataset_sensor, recache_schedule
from assets.names import DEFAULT_RUN_CONFIG, RECIPE_TAG, asset_key
from assets.raw_images import build_raw_images
from assets.text_embeddings import build_text_embeddings
from assets.trained_lora import build_trained_lora
from assets.vae_latents import build_vae_latents
from assets.validated_dataset import build_validated_dataset
from pipeline.recipe import Recipe

ASSET_BUILDERS = (
    build_raw_images,
    build_validated_dataset,
    build_aspect_buckets,
    build_vae_latents,
    build_text_embeddings,
    build_trained_lora,
)
"""Builders of a recipe's assets, from the first to the last."""


def recipe_graph(recipe: Recipe) -> Definitions:
    """Return every definition that follows from `recipe`, without the resources, which all recipes share."""
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
        assets=[build(recipe) for build in ASSET_BUILDERS],
        jobs=[cache_job, train_job],
        schedules=[schedule] if schedule is not None else [],
        sensors=[dataset_sensor(recipe, cache_job.name)],
    )
