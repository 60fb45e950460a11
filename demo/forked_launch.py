"""Launches of studies in forked processes: the imports take most of the time of so short a training."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from dagster import AssetExecutionContext

from pipeline.processes.launch import (
    PARENT_VARIABLE,
    Launch,
    Meanwhile,
    OutputFile,
    launch_environment,
    launch_error,
)
from pipeline.recipe import AccelerateSettings
from resources.local_launcher import AccelerateLauncher, Observer

_PRELOADED = ("demo.forked_launch", "diffusers", "peft", "pipeline.trained_lora.worker.loop")


class ForkedLaunch:
    """A `Launch` that forks a process with all libraries imported.

    Attributes:
        launches: Number of launches by module.
    """

    def __init__(self, settings: AccelerateSettings) -> None:
        # The server imports torch, which reads the number of threads then.
        os.environ |= {"OMP_NUM_THREADS": str(settings.cpu_threads), "OMP_WAIT_POLICY": "PASSIVE"}
        self._settings = settings
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*_PRELOADED])
        self.launches = Counter[str]()

    def __call__(self, module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
        """See `Launch.__call__`."""
        self.launches[module] += 1
        with tempfile.TemporaryDirectory(prefix="latentline-") as folder:
            error_file, output = Path(folder, "error.json"), Path(folder, "output.txt")
            variables = launch_environment(self._settings, error_file)
            process = self._context.Process(target=_run, args=(module, job_file, variables, output))
            process.start()
            try:
                if meanwhile is not None:
                    meanwhile()
                process.join()
            finally:
                process.kill()
            if process.exitcode:
                lines = OutputFile(output).lines()
                raise launch_error(module, process.exitcode, output=lines, error_file=error_file)


class ForkedLauncher(AccelerateLauncher):
    """The resource of a job in which each launch is a `ForkedLaunch`."""

    def bind(
        self, context: AssetExecutionContext, settings: AccelerateSettings, observer: Observer | None = None
    ) -> Launch:
        """See `AccelerateLauncher.bind`; nothing is observed."""
        return ForkedLaunch(settings)


def _run(module: str, job_file: Path, variables: Mapping[str, str], output: Path) -> None:
    """Run an entry module in this process, which was just forked."""
    os.environ |= {**variables, PARENT_VARIABLE: str(os.getppid())}
    with output.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = [module, str(job_file)]
    runpy.run_module(module, run_name="__main__")
