"""Forecast a recipe's memory in a separate process, from the configuration files of its base model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.memory.job import MemoryForecast, MemoryJob, read_result, write_job
from pipeline.models.resolve import config_folder
from pipeline.processes.launch import LocalLaunch
from pipeline.recipe import AccelerateSettings

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

ENTRY_MODULE = "pipeline.memory.worker"


def forecast_memory(recipe: Recipe, *, card_bytes: int | None = None) -> MemoryForecast:
    """Return the peak memory of each stage of a recipe, and the changes that make it fit.

    `card_bytes` is the memory of the GPU to compare with; None for the GPU of this machine, if there is one.

    Raises:
        ModelError: A configuration file is missing and cannot be downloaded, or the forecast does not support
            the model.
        FamilyError: The family of the model's pipeline class is not supported.
        LaunchError: The process failed.
    """
    # No weights are read, so a base model on the Hub is not downloaded, except its configuration files.
    folder, replaced = config_folder(recipe)
    return forecast_folder(recipe, folder, replaced, card_bytes=card_bytes)


def forecast_folder(
    recipe: Recipe, folder: Path, replaced: Mapping[str, Path], *, card_bytes: int | None = None
) -> MemoryForecast:
    """Return `forecast_memory` for a base model in a known folder."""
    with tempfile.TemporaryDirectory(prefix="latentline-") as work:
        job_file = Path(work) / "job.json"
        write_job(MemoryJob(recipe, folder, replaced, card_bytes), job_file)
        LocalLaunch(AccelerateSettings())(ENTRY_MODULE, job_file)
        return read_result(job_file)
