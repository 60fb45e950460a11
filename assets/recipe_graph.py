"""The graph of one recipe: its assets, checks, jobs, schedule and sensor."""

from dagster import AssetsDefinition, AssetSelection, Definitions, define_asset_job, in_process_executor

from assets.aspect_buckets import aspect_buckets
from assets.automation import dataset_sensor, recache_schedule
from assets.checks import asset_checks
from assets.naming import JOBS, RECIPE_TAG, asset_key
from assets.raw_images import raw_images
from assets.text_embeddings import text_embeddings
from assets.trained_lora import trained_lora
from assets.vae_latents import vae_latents
from assets.validated_dataset import validated_dataset
from pipeline.recipe import Recipe

ASSETS = (raw_images, validated_dataset, aspect_buckets, vae_latents, text_embeddings, trained_lora)
"""In the order of the graph; each makes one asset of a recipe."""


def recipe_graph(recipe: Recipe) -> Definitions:
    """Everything that follows from `recipe`, without the resources, which all recipes share."""
    everything = AssetSelection.groups(recipe.name)
    trained = AssetSelection.assets(asset_key(recipe, "trained_lora"))
    selections = {"cache": everything - trained, "train": everything}
    jobs = {
        name: define_asset_job(
            f"{recipe.name}_{name}",
            selection=selections[name],
            description=description,
            tags={RECIPE_TAG: recipe.name},
            executor_def=in_process_executor,
        )
        for name, description in JOBS.items()
    }
    schedule = recache_schedule(recipe, jobs["cache"])
    assets: list[AssetsDefinition] = [make(recipe) for make in ASSETS]
    return Definitions(
        assets=assets,
        asset_checks=asset_checks(recipe),
        jobs=list(jobs.values()),
        schedules=[schedule] if schedule is not None else [],
        sensors=[dataset_sensor(recipe, jobs["cache"])],
    )
