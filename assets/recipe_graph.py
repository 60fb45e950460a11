"""The graph of one recipe: assets, checks, jobs, schedule and sensor, also of one that is broken."""

import re
from collections.abc import Collection, Sequence

from dagster import (
    AssetKey,
    AssetsDefinition,
    AssetSelection,
    AssetSpec,
    Definitions,
    JobDefinition,
    OpDefinition,
    define_asset_job,
    job,
    op,
)

from assets.aspect_buckets import build_aspect_buckets
from assets.automation import dataset_sensor, recache_schedule, skipping_schedule, skipping_sensor
from assets.captions import build_captions
from assets.diagnosis import build_diagnosis
from assets.evaluation import build_evaluation
from assets.location import Location
from assets.names import AFTER_CACHE, asset_key
from assets.raw_images import build_raw_images
from assets.sweep import build_sweep
from assets.text_embeddings import build_text_embeddings
from assets.trained_lora import build_trained_lora
from assets.vae_latents import build_vae_latents
from assets.validated_dataset import build_validated_dataset
from pipeline.errors import RecipeError
from pipeline.escaping import markdown_block
from pipeline.recipe import BrokenRecipe, Recipe
from pipeline.recipe.schema import RESERVED_NAMES
from pipeline.storage.needed_columns import ALL_INPUTS, STAGE_INPUTS
from resources.failures import errors_as_failures
from resources.run_names import RECIPE_TAG
from resources.terminal_log import TERMINAL_LOGGER, terminal_logger

CACHE_ASSETS = (
    build_raw_images,
    build_validated_dataset,
    build_aspect_buckets,
    build_vae_latents,
    build_text_embeddings,
)
"""Builders of the assets up to the cache."""

OPTIONAL = {
    "captions": build_captions,
    "diagnosis": build_diagnosis,
    "evaluation": build_evaluation,
    "sweep": build_sweep,
}
"""Builders of the assets that only some recipes have."""

_ORDER = (("captions", "validated_dataset"), ("diagnosis", "trained_lora"), ("trained_lora", "sweep"))
"""(asset, later asset): the later one names the first in `deps` without reading its table, so `ALL_INPUTS`
lacks the pair. Keep equal to the `deps` of the builders."""

ERROR_ASSET = "recipe_error"
"""Last part of the key of the external asset that shows a recipe's error."""


def recipe_assets(
    recipe: Recipe, location: Location, *, start: AssetKey | None = None
) -> list[AssetsDefinition]:
    """Return the assets of `recipe`, from the first to the last; see `recipe_graph`."""
    cached = [build(recipe, location) for build in CACHE_ASSETS]
    optional = [OPTIONAL[name](recipe, location) for name in recipe.optional_assets]
    return [*cached, build_trained_lora(recipe, location, start=start), *optional]


def recipe_graph(recipe: Recipe, location: Location, *, start: AssetKey | None = None) -> Definitions:
    """Return every definition that follows from `recipe`.

    `start` is the asset with the LoRA that the training starts from, if another recipe trains it.
    """
    # Not by the group, because a recipe may have the name of another group.
    keys = {name: asset_key(recipe, name) for name in (*STAGE_INPUTS, *recipe.optional_assets)}
    cache_job = define_asset_job(
        f"{recipe.name}_cache",
        selection=AssetSelection.assets(*(key for name, key in keys.items() if name not in AFTER_CACHE)),
        description="Brings tables, latents and text embeddings up to date.",
        tags={RECIPE_TAG: recipe.name},
        config=location.job_config,
        executor_def=location.executor,
    )
    train_job = define_asset_job(
        f"{recipe.name}_train",
        selection=AssetSelection.assets(*keys.values()),
        description="Brings the cache up to date, then trains the LoRA.",
        tags={RECIPE_TAG: recipe.name},
        config=location.job_config,
        executor_def=location.executor,
    )

    schedule, sensor = recache_schedule(recipe, cache_job.name), dataset_sensor(recipe, cache_job.name)
    return Definitions(
        assets=recipe_assets(recipe, location, start=start),
        jobs=[cache_job, train_job],
        schedules=[schedule] if schedule is not None else [],
        sensors=[sensor] if sensor is not None else [],
    )


def broken_recipe_graphs(
    broken: Sequence[BrokenRecipe], taken: Collection[str], location: Location
) -> list[Definitions]:
    """Return the definitions of each broken recipe; `taken` are the names of usable recipes."""
    names = {*taken, *RESERVED_NAMES}
    graphs: list[Definitions] = []
    for recipe in broken:
        name = _free_name(recipe.name, names)
        names.add(name)
        graphs.append(_broken_graph(name, recipe, location))
    return graphs


def _free_name(name: str, taken: Collection[str]) -> str:
    # Dagster allows letters, digits and _ in names, while a file may have any name.
    valid = re.sub(r"[^A-Za-z0-9_]", "_", name)
    number = 2
    free = valid
    while free in taken:
        free = f"{valid}_{number}"
        number += 1
    return free


def _broken_graph(name: str, broken: BrokenRecipe, location: Location) -> Definitions:
    """Return the definitions of a broken recipe, none of which can materialize anything.

    An external asset has the error as its description. The recipe's own assets are external too, its jobs
    fail with the error, and its schedule and sensor skip each tick.
    """
    error = broken.error
    shown = AssetSpec(
        AssetKey([name, ERROR_ASSET]),
        description=f"This recipe is excluded until its file is repaired.\n\n{markdown_block(str(error))}",
        group_name=name,
        kinds={"yaml"},
        metadata={"what": error.what, "where": error.where, "fix": error.fix},
    )
    failing_op = _failing_op(name, error)
    jobs = [_job_of(failing_op, location, name=f"{name}_{kind}", recipe=name) for kind in ("cache", "train")]

    # Likewise, the UI would no longer know whether they were switched on.
    reason = f"recipe {name} is excluded: {error.what.splitlines()[0]}"
    schedule = skipping_schedule(name, broken.recache, jobs[0].name, reason)
    sensor = skipping_sensor(name, broken.recache, jobs[0].name, reason)
    return Definitions(
        assets=[shown, *_excluded_assets(name, broken)],
        jobs=jobs,
        schedules=[schedule] if schedule is not None else [],
        sensors=[sensor] if sensor is not None else [],
    )


def _excluded_assets(name: str, broken: BrokenRecipe) -> list[AssetSpec]:
    """Return the assets of a broken recipe as external ones."""
    # Without these names, the history of the assets would vanish from the UI as long as the mistake exists.
    inputs = {asset: list(ALL_INPUTS[asset]) for asset in (*STAGE_INPUTS, *broken.optional_assets)}
    for asset, waiting in _ORDER:
        if {asset, waiting} <= inputs.keys():
            inputs[waiting].append(asset)
    return [
        AssetSpec(
            AssetKey([name, asset]),
            deps=[AssetKey([name, each]) for each in before],
            description=f"Excluded until the recipe is repaired: see {name}/{ERROR_ASSET}.",
            group_name=name,
        )
        for asset, before in inputs.items()
    ]


def _failing_op(name: str, error: RecipeError) -> OpDefinition:
    @op(name=f"{name}__{ERROR_ASSET}")
    def recipe_error() -> None:
        """Fail with the error of the recipe."""
        with errors_as_failures():
            raise error

    return recipe_error


def _job_of(failing_op: OpDefinition, location: Location, *, name: str, recipe: str) -> JobDefinition:
    @job(
        name=name,
        description="Fails with the error of the recipe.",
        tags={RECIPE_TAG: recipe},
        config=location.job_config,
        executor_def=location.executor,
        logger_defs={TERMINAL_LOGGER: terminal_logger},
    )
    def failing_job() -> None:
        failing_op()

    return failing_job
