"""Forecast a recipe's memory in a separate process, from the configuration files of its base model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.captions.entries import same_request
from pipeline.captions.examples import examples_of
from pipeline.captions.model import dtype_of
from pipeline.memory.job import CaptionerJob, MemoryForecast, MemoryJob, read_result, write_job
from pipeline.models.captioner_folder import resolve_configs
from pipeline.models.resolve import config_folder
from pipeline.processes.launch import LocalLaunch
from pipeline.recipe import AccelerateSettings

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

ENTRY_MODULE = "pipeline.memory.worker"


def forecast_memory(
    recipe: Recipe, *, card_bytes: int | None = None, card: str | None = None
) -> MemoryForecast:
    """Return the peak memory of each stage of a recipe, the changes that make it fit, and computed times.

    `card_bytes` is the memory of the GPU to compare with, and `card` its name in `gpus.GPUS`, if it is there;
    both are None for the GPU of this machine, if there is one.

    Raises:
        DatasetError: The image of an example for a captioning model cannot be used.
        ModelError: A configuration file is missing and cannot be downloaded, or the forecast does not support
            the model.
        FamilyError: The family of the model's pipeline class is not supported.
        LaunchError: The process failed.
    """
    # No weights are read, so a base model on the Hub is not downloaded, except its configuration files.
    folder, replaced = config_folder(recipe)
    captioners = _captioners(recipe)
    return forecast_folder(recipe, folder, replaced, card_bytes=card_bytes, card=card, captioners=captioners)


def forecast_folder(
    recipe: Recipe,
    folder: Path,
    replaced: Mapping[str, Path],
    *,
    card_bytes: int | None = None,
    card: str | None = None,
    captioners: Sequence[CaptionerJob] = (),
) -> MemoryForecast:
    """Return `forecast_memory` for models in known folders."""
    with tempfile.TemporaryDirectory(prefix="latentline-") as work:
        job_file = Path(work) / "job.json"
        write_job(MemoryJob(recipe, folder, replaced, card_bytes, captioners, card), job_file)
        LocalLaunch(AccelerateSettings())(ENTRY_MODULE, job_file)
        return read_result(job_file)


def _captioners(recipe: Recipe) -> list[CaptionerJob]:
    of_models = [each.captions for each in recipe.datasets if each.captions.from_ == "model"]
    distinct = dict.fromkeys(same_request(each) for each in of_models if each.tagger is None)
    where = f"{recipe.source}, datasets[].captions"
    jobs: list[CaptionerJob] = []
    for captions in distinct:
        folder = resolve_configs(captions, where=where)
        examples = examples_of(captions, where=where)
        jobs.append(CaptionerJob(captions, folder, dtype_of(captions, folder), examples))
    return jobs
