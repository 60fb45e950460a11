"""A launcher of Dagster jobs that encodes and trains in the process of the test."""

from __future__ import annotations

from pathlib import Path

import torch
from dagster import AssetExecutionContext

from pipeline.processes.launch import Launch, Meanwhile, cpu_threads
from pipeline.recipe import AccelerateSettings
from resources.local_launcher import AccelerateLauncher, Observer
from tests.in_process_worker import InProcessLaunch, forget_precision


class InProcessLauncher(AccelerateLauncher):
    """A launcher whose results equal the results of a real process, with its threads and its precision."""

    def bind(
        self, context: AssetExecutionContext, settings: AccelerateSettings, observer: Observer | None = None
    ) -> Launch:
        def launch(module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
            observe = observer(job_file) if observer is not None else lambda _final: None
            threads = torch.get_num_threads()
            torch.set_num_threads(cpu_threads())
            forget_precision()
            try:
                InProcessLaunch()(module, job_file, meanwhile)
            finally:
                forget_precision()
                torch.set_num_threads(threads)
            observe(True)

        return launch
