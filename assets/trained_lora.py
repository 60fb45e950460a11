"""trained_lora: the LoRA, trained from the cache alone."""

import base64
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dagster import (
    AssetCheckResult,
    AssetExecutionContext,
    AssetKey,
    AssetObservation,
    AssetsDefinition,
    Field,
    Float,
    Int,
    MaterializeResult,
    MetadataValue,
    Noneable,
    String,
    multi_asset,
)

from assets.checks import check_specs
from assets.metadata import picture_metadata, pictures_once, publish, report_metadata, table_metadata
from assets.names import asset_key, step_name
from assets.sources import model_key
from assets.step import TABLE, run_step, table_in, table_out
from pipeline.recipe import Recipe, recipe_values
from pipeline.recipe.overrides import CONTINUE
from pipeline.reporting import tensorboard
from resources.local_launcher import AccelerateLauncher
from resources.step_log import StepLog, run_log

DESCRIPTION = (
    "The LoRA in three layouts, trained from the cache with accelerate. A finished run with the same inputs "
    "and settings is reused."
)


def build_trained_lora(recipe: Recipe, *, pool: str, start: AssetKey | None = None) -> AssetsDefinition:
    """Build the asset `<recipe>/trained_lora` with its checks.

    `start` is the asset with the LoRA that the training starts from, if another recipe trains it.
    """

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
        deps=[
            model_key(recipe),
            *([start] if start is not None else []),
            # Training does not read it, but waits for its gate.
            *(asset_key(recipe, name) for name in recipe.optional_assets if name == "diagnosis"),
        ],
        check_specs=check_specs(recipe, "trained_lora"),
        can_subset=True,
        pool=pool,
        config_schema=_run_config(recipe),
    )
    def trained_lora(
        context: AssetExecutionContext, launcher: AccelerateLauncher, latents: Any, text: Any
    ) -> Iterator[AssetCheckResult | MaterializeResult[Any]]:
        from pipeline.trained_lora import checks
        from pipeline.trained_lora.stage import train_lora

        def materialize() -> MaterializeResult[Any]:
            launch = launcher.bind(context, recipe.accelerate, observe_training(context, recipe))
            overrides = context.op_execution_context.op_config
            result = train_lora(
                recipe, latents, text, launch=launch, log=run_log(context), overrides=overrides
            )
            shown = picture_metadata(recipe.output_dir / "reports" / "trained_lora")
            pictures = pictures_once(context, asset_key(recipe, "trained_lora"), shown)
            files = _file_metadata(recipe, result.report["run"])
            return publish(
                recipe, "trained_lora", result, log=run_log(context), pictures=pictures, files=files
            )

        yield from run_step(context, recipe, "trained_lora", materialize, checks.run)

    return trained_lora


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
                    observation = AssetObservation(asset_key(recipe, "trained_lora"), metadata=metadata)
                    context.instance.report_runless_asset_event(observation)
            # A picture or the event log must not stop a training. With a database that is away, each further
            # attempt would make the training wait.
            except Exception as err:
                is_broken = True
                reason = f"{type(err).__name__}: {err}".splitlines()[0]
                StepLog(context).warning(f"no more live observations: {reason}")

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
        CONTINUE: Field(
            Noneable(String),
            default_value=None,
            description="Run that a new run takes weights, optimizer and steps from, or latest. null begins "
            "at step 0.",
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
