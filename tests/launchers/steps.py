"""A Dagster step around the work of a launcher, and what tests of launchers do in it."""

import shutil
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dagster import AssetExecutionContext, DagsterInstance, asset, materialize

from pipeline.recipe import AccelerateSettings
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.vae_latents.stage import cache_latents
from resources.local_launcher import AccelerateLauncher
from tests.refused_events import events_refused

LONGEST_WAIT_S = 900.0


def in_step(
    launcher: AccelerateLauncher,
    work: Callable[[Any], object],
    settings: AccelerateSettings | None = None,
    *,
    refusing: Path | None = None,
) -> tuple[list[str], BaseException | None]:
    """Call `work` with a launch in a step; return the messages in Dagster's log, and the error.

    Args:
        launcher: Launcher of the step.
        work: Receives the launch.
        settings: The recipe's settings of accelerate.
        refusing: An empty folder for an instance whose event log refuses events while `work` runs.
    """
    errors: list[BaseException] = []

    # Annotated as in the project's assets.
    @asset
    def step(context: AssetExecutionContext, launcher: AccelerateLauncher) -> None:
        with nullcontext() if refusing is None else events_refused(refusing):
            try:
                work(launcher.bind(context, settings or AccelerateSettings()))
            except BaseException as err:
                errors.append(err)

    ephemeral = refusing is None
    with DagsterInstance.ephemeral() if ephemeral else DagsterInstance.local_temp(str(refusing)) as instance:
        result = materialize([step], resources={"launcher": launcher}, instance=instance)
        messages = [entry.user_message for entry in instance.all_logs(result.run_id)]
    return messages, errors[0] if errors else None


def encode(project: Any, launch: Any) -> Any:
    """Encode the latents of a cache case."""
    return cache_latents(project.recipe, project.buckets(), project.tables, launch=launch, log=str)


def encode_without_model(cache: Any, model: Path, copy: Path) -> Callable[[Any], object]:
    """Return work for `in_step`: an encoding whose base model is deleted before the workers start.

    Args:
        cache: The cache case.
        model: Its base model, which stays.
        copy: Folder for the copy that is used and deleted.
    """
    shutil.copytree(model, copy)
    project = cache.with_settings(model={"base": str(copy)})

    def work(launch: Any) -> None:
        def remove_model_first(module: str, job_file: Path, meanwhile: Any) -> None:
            meanwhile()
            shutil.rmtree(copy)
            launch(module, job_file)

        encode(project, remove_model_first)

    return work


def when_steps_are_done(job: TrainingJob, number: int, act: Callable[[], object]) -> None:
    """Call `act` in a thread when the run has done a number of steps; never, if it does not do them."""

    def wait() -> None:
        end_s = time.monotonic() + LONGEST_WAIT_S
        while len(read_metrics(RunLayout(job.folder).metrics, 10**6)) < number:
            if time.monotonic() > end_s:
                return
            time.sleep(0.05)
        act()

    threading.Thread(target=wait, daemon=True).start()
