"""Base of launchers that encode and train on other machines; tested through its subclasses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dagster import AssetExecutionContext
from pydantic import Field

from pipeline.encoding.collecting import encode_on_workers
from pipeline.encoding.shared_encoding import SharedEncoding
from pipeline.encoding.workers import DIAGNOSIS_MODULE, EVALUATION_MODULE, WORKERS
from pipeline.processes.launch import TRAINING_MODULE, Launch, Meanwhile
from resources.local_launcher import AccelerateLauncher, Observer
from resources.step_log import run_log

if TYPE_CHECKING:
    from pipeline.recipe import AccelerateSettings


class RemoteLauncher(AccelerateLauncher):
    """Base of launchers that encode and train on other machines.

    An encoding is written to the cache, where its workers find it. Subclasses run the workers, and the
    training if they can.
    """

    workers: int = Field(default=1, ge=1, description="Number of shards of an encoding.")
    machines: int = Field(default=1, ge=1, description="Number of machines of a training.")

    def bind(
        self, context: AssetExecutionContext, settings: AccelerateSettings, observer: Observer | None = None
    ) -> Launch:
        """See `AccelerateLauncher.bind`; a launched module starts when `meanwhile` has ended."""
        on_this_machine = AccelerateLauncher(grace_s=self.grace_s).bind(context, settings, observer)

        def launch(module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
            # The processes start on complete files, because they may start on several machines.
            if meanwhile is not None:
                meanwhile()
            if module in (DIAGNOSIS_MODULE, EVALUATION_MODULE):
                # They read models and the LoRA files of the run, which other machines may not have.
                on_this_machine(module, job_file)
            elif module in WORKERS.values():
                encode_on_workers(
                    job_file,
                    partial(self.encode, context, settings),
                    max_workers=self.workers,
                    cpu_threads=settings.cpu_threads,
                    log=run_log(context),
                )
            else:
                self.train(context, settings, job_file, observer)

        return launch

    @abstractmethod
    def encode(
        self,
        context: AssetExecutionContext,
        settings: AccelerateSettings,
        encoding: SharedEncoding,
        num_shards: int,
    ) -> Sequence[str]:
        """Run `latentline encode` for each shard until all have ended, and return their last output.

        Raises:
            LaunchError: The workers could not be started.
        """

    def train(
        self,
        context: AssetExecutionContext,
        settings: AccelerateSettings,
        job_file: Path,
        observer: Observer | None,
    ) -> None:
        """Run a training until it has ended, by default on the machine of the step; see `Launch`."""
        super().bind(context, settings, observer)(TRAINING_MODULE, job_file)
