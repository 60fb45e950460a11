"""The graph of one recipe: its assets, checks, jobs, schedule and sensor."""

from collections.abc import Mapping
from typing import Any

from dagster import AssetSelection, Definitions, define_asset_job, in_process_executor
from dagster._core.definitions.assets.graph.asset_graph import AssetGraph

from assets.aspect_buckets import ASPECT_BUCKETS
from assets.automation import dataset_sensor, recache_schedule
from assets.naming import JOBS, RECIPE_TAG, asset_key
from assets.raw_images import RAW_IMAGES
from assets.text_embeddings import TEXT_EMBEDDINGS
from assets.trained_lora import TRAINED_LORA
from assets.vae_latents import VAE_LATENTS
from assets.validated_dataset import VALIDATED_DATASET
from pipeline.recipe import Recipe

ASSETS = (RAW_IMAGES, VALIDATED_DATASET, ASPECT_BUCKETS, VAE_LATENTS, TEXT_EMBEDDINGS, TRAINED_LORA)
"""In the order of the graph."""


def recipe_graph(recipe: Recipe, resources: Mapping[str, Any]) -> Definitions:
    """Everything that follows from `recipe`, without `resources`, which all recipes share.

    Its jobs are resolved here, among its own assets: for each, Dagster would else look at all recipes'.
    """
    assets = [step.of(recipe) for step in ASSETS]
    trained = AssetSelection.assets(asset_key(recipe, "trained_lora"))
    selections = {"cache": AssetSelection.all() - trained, "train": AssetSelection.all()}
    unresolved = [
        define_asset_job(
            f"{recipe.name}_{name}",
            selection=selections[name],
            description=description,
            tags={RECIPE_TAG: recipe.name},
            executor_def=in_process_executor,
        )
        for name, description in JOBS.items()
    ]
    graph = AssetGraph.from_assets(assets)
    jobs = [job.resolve(graph, resource_defs=resources) for job in unresolved]
    cache_job = jobs[0]
    schedule = recache_schedule(recipe, cache_job)
    return Definitions(
        assets=assets,
        jobs=jobs,
        schedules=[schedule] if schedule is not None else [],
        sensors=[dataset_sensor(recipe, cache_job)],
    )
