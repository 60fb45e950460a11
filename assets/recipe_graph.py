"""The graph of one recipe: its assets, checks, jobs, schedule and sensor."""

from dagster import AssetSelection, Definitions, define_asset_job, in_process_executor

from assets.aspect_buckets import ASPECT_BUCKETS
from assets.automation import dataset_sensor, recache_schedule
from assets.checks import asset_checks
from assets.naming import JOBS, RECIPE_TAG, asset_key
from assets.raw_images import RAW_IMAGES
from assets.text_embeddings import TEXT_EMBEDDINGS
from assets.trained_lora import TRAINED_LORA
from assets.vae_latents import VAE_LATENTS
from assets.validated_dataset import VALIDATED_DATASET
from pipeline.recipe import Recipe

ASSETS = (RAW_IMAGES, VALIDATED_DATASET, ASPECT_BUCKETS, VAE_LATENTS, TEXT_EMBEDDINGS, TRAINED_LORA)
"""In the order of the graph."""


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
    return Definitions(
        assets=[step.of(recipe) for step in ASSETS],
        asset_checks=asset_checks(recipe),
        jobs=list(jobs.values()),
        schedules=[schedule] if schedule is not None else [],
        sensors=[dataset_sensor(recipe, jobs["cache"])],
    )
