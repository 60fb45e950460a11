"""trained_lora: the LoRA, trained from the cache alone."""

import base64
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetCheckResult,
    AssetExecutionContext,
    AssetKey,
    AssetObservation,
    AssetsDefinition,
    AssetSpec,
    Config,
    MaterializeResult,
    MetadataValue,
)
from pydantic import Field, create_model

from assets.location import Location
from assets.metadata import output_file, publish, report_metadata, table_metadata
from assets.names import asset_key
from assets.pictures import picture_metadata, pictures_once
from assets.sources import base_model
from assets.step import run_step, stage_asset, stage_spec
from pipeline.recipe import Recipe, recipe_values
from pipeline.reporting import tensorboard
from resources.step_log import run_log, step_log

if TYPE_CHECKING:
    from pipeline.processes.launch import Launch

DESCRIPTION = (
    "The LoRA in three layouts, trained from the cache with accelerate. A finished run with the same inputs "
    "and settings is reused."
)


class TrainingConfig(Config):
    """Settings of a run in the launchpad or a `-c` file; null is the value of the recipe."""

    steps: int | None = Field(
        description="Number of optimizer steps. null uses the recipe's steps or epochs."
    )
    rank: int | None = Field(description="Inner dimension of each adapter matrix.")
    learning_rate: float | None = Field(description="Learning rate after warm-up.")
    seed: int | None = Field(description="Seed of noise, sample order and initial weights.")
    continue_run: str | None = Field(
        default=None,
        description="Run that a new run takes weights, optimizer and steps from, or latest. null begins at "
        "step 0.",
    )


def build_trained_lora(
    recipe: Recipe, location: Location, *, start: AssetKey | None = None
) -> AssetsDefinition:
    """Build the asset `<recipe>/trained_lora` with its checks.

    `start` is the asset with the LoRA that the training starts from, if another recipe trains it.
    """
    config_type = _config_type(recipe)

    @stage_asset(
        recipe,
        location,
        _spec(recipe, start),
        inputs={"latents": "vae_latents", "text": "text_embeddings"},
        launches=True,
        pool=location.pool,
    )
    def trained_lora(
        context: AssetExecutionContext,
        # The class has the recipe's values as defaults, so it exists for this function only.
        config: config_type,  # pyright: ignore[reportInvalidTypeForm, reportUnknownParameterType]
        latents: Any,
        text: Any,
    ) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        from pipeline.trained_lora import checks

        def materialize() -> MaterializeResult[Any]:
            launcher = location.launcher_of(context)
            launch = launcher.bind(context, recipe.accelerate, observe_training(context, recipe))
            return _train(context, recipe, latents, text, launch=launch, overrides=config.model_dump())

        yield from run_step(context, recipe, "trained_lora", materialize, checks.run)

    return trained_lora


def _spec(recipe: Recipe, start: AssetKey | None) -> AssetSpec:
    return stage_spec(
        recipe,
        "trained_lora",
        DESCRIPTION,
        kinds={"pytorch", "huggingface"},
        deps=[
            base_model(recipe).key,
            *([start] if start is not None else []),
            # Training does not read it, but waits for its gate.
            *(asset_key(recipe, name) for name in recipe.optional_assets if name == "diagnosis"),
        ],
    )


def _train(
    context: AssetExecutionContext,
    recipe: Recipe,
    latents: Any,
    text: Any,
    *,
    launch: "Launch",
    overrides: Mapping[str, Any],
) -> MaterializeResult[Any]:
    from pipeline.trained_lora.stage import train_lora

    result = train_lora(recipe, latents, text, launch=launch, log=run_log(context), overrides=overrides)
    pictures = pictures_once(context, picture_metadata(recipe.output_dir / "reports" / "trained_lora"))
    files = _file_metadata(recipe, result.report["run"])
    return publish(recipe, "trained_lora", result, log=run_log(context), pictures=pictures, files=files)


def observe_training(
    context: AssetExecutionContext, recipe: Recipe
) -> Callable[[Path], Callable[[bool], None]]:
    """Return an observer for `AccelerateLauncher.bind`, which reports a run's state to the event log."""

    def follow(job_file: Path) -> Callable[[bool], None]:
        from pipeline.trained_lora.live import LiveRun

        run = LiveRun(job_file)
        is_broken = False
        # Each observation has the last value of each number, so that the plots have no gaps.
        numbers: dict[str, int | float] = {}

        def poll(final: bool) -> None:
            nonlocal is_broken
            if is_broken:
                return
            try:
                state = run.poll(final=final)
                if state is not None:
                    numbers.update(state.numbers())
                    if state.previews:
                        numbers["previews_step"] = state.previews[0].step
                    metadata = _live_metadata(context, numbers, state.picture())
                    # Dagster holds back the events of `context.log_event` until the step yields its next
                    # output, which is after the training. This call writes at once.
                    observation = AssetObservation(context.asset_key, metadata=metadata)
                    context.instance.report_runless_asset_event(observation)
            # A picture or the event log must not stop a training. With a database that is away, each further
            # attempt would make the training wait.
            except Exception as err:
                is_broken = True
                reason = f"{type(err).__name__}: {err}".splitlines()[0]
                step_log(context).warning(f"no more live observations: {reason}")

        return poll

    return follow


def _live_metadata(
    context: AssetExecutionContext, numbers: Mapping[str, int | float], picture: bytes
) -> dict[str, MetadataValue[Any]]:
    """Return the metadata of an observation; new previews are shown once, because of their size."""
    metadata = report_metadata(dict(numbers))
    if picture:
        data = base64.b64encode(picture).decode("ascii")
        metadata["previews"] = MetadataValue.md(f"![previews](data:image/jpeg;base64,{data})")
    return {**metadata, "dagster_run": MetadataValue.dagster_run(context.run.run_id)}


def _config_type(recipe: Recipe) -> type[TrainingConfig]:
    """Return `TrainingConfig` with the recipe's values as defaults, which the launchpad shows."""
    fields = TrainingConfig.model_fields
    defaults: dict[str, Any] = {
        name: (fields[name].annotation, Field(default=value, description=fields[name].description))
        for name, value in recipe_values(recipe).items()
    }
    return create_model("TrainingConfig", __base__=TrainingConfig, **defaults)


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
        **{name: output_file(recipe, path) for name, path in paths.items()},
    }
