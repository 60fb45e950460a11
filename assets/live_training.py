"""Observations of `<recipe>/trained_lora` while it is training, which Dagster's UI lists and plots."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dagster import AssetExecutionContext, AssetObservation, MetadataValue

from assets.metadata import report_metadata
from assets.names import asset_key
from pipeline.recipe import Recipe
from resources.step_log import StepLog


def observe_training(
    context: AssetExecutionContext, recipe: Recipe
) -> Callable[[Path], Callable[[bool], None]]:
    """Return an observer for `AccelerateLauncher.bind`, which reports a run's state to the event log.

    An observation that cannot be reported is a warning: the training continues without further ones.
    """

    def follow(job_file: Path) -> Callable[[bool], None]:
        from pipeline.trained_lora.live import LiveRun

        run = LiveRun(job_file)
        is_broken = False

        def poll(final: bool) -> None:
            nonlocal is_broken
            if is_broken:
                return
            try:
                state = run.poll(final=final)
                if state is not None:
                    metadata = _metadata(context, state)
                    # Dagster holds back the events of `context.log_event` until the step yields its next
                    # output, which is after the training. This call writes at once.
                    observation = AssetObservation(asset_key(recipe, "trained_lora"), metadata=metadata)
                    context.instance.report_runless_asset_event(observation)
            except Exception as err:  # a picture or the event log must not stop a training
                is_broken = True
                reason = f"{type(err).__name__}: {err}".splitlines()[0]
                StepLog(context).warning(f"no more live observations: {reason}")

        return poll

    return follow


def _metadata(context: AssetExecutionContext, state: Any) -> dict[str, MetadataValue[Any]]:
    """Return the metadata of a `pipeline.trained_lora.live.LiveState`."""
    metadata = report_metadata(state.numbers())
    if picture := state.picture():
        data = base64.b64encode(picture).decode("ascii")
        metadata["previews"] = MetadataValue.md(f"![previews](data:image/jpeg;base64,{data})")
    return {**metadata, "dagster_run": MetadataValue.dagster_run(context.run.run_id)}
