"""Datasets of studies: the demo's pictures drawn anew, changed, and encoded in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from demo.concept_pictures import write_pictures
from demo.experiments import changed_demo
from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.log import discard
from pipeline.processes.launch import TRAINING_MODULE
from pipeline.raw_images.stage import scan
from pipeline.storage.needed_columns import needed_columns
from pipeline.storage.tables import Tables
from pipeline.text_embeddings.stage import cache_text
from pipeline.trained_lora.inputs import TrainingInputs, training_inputs
from pipeline.trained_lora.job import TrainingJob
from pipeline.vae_latents.stage import cache_latents
from pipeline.validated_dataset.stage import validate

if TYPE_CHECKING:
    from pipeline.processes.launch import Meanwhile
    from pipeline.recipe import Recipe
    from pipeline.reporting.reports import StageResult

Change = Callable[[Path], dict[str, str]]
"""Changes the pictures in a folder, and returns what was changed, by the name of the image."""


def dataset(
    folder: Path, cache: Path, seed: int, change: Change, *, without: Sequence[str] = (), **sections: Any
) -> tuple[Recipe, dict[str, str]]:
    """Draw the demo's dataset, change it, fill its caches, and return its recipe and what was changed.

    Args:
        folder: An existing folder.
        cache: Folder of the cache, which datasets may share.
        seed: Seed of the pictures.
        change: Changes the pictures.
        without: Names of images to remove then.
        sections: Changes of the demo's recipe.
    """
    pictures = folder / "pictures"
    write_pictures(pictures, seed)
    # Pictures of one world resemble each other more than photographs.
    checks_section = {"near_duplicate_bits": 0}
    recipe = changed_demo(folder, cache_dir=str(cache), checks=checks_section, **sections)
    changed = change(pictures)
    for name in without:
        for file in pictures.rglob(f"{name}.*"):
            file.unlink()

    tables = Tables(recipe.output_dir)
    _keep(tables, "raw_images", scan(recipe, tables, log=discard))
    scanned = tables.read("raw_images", needed_columns("validated_dataset", "raw_images"))
    _keep(tables, "validated_dataset", validate(recipe, scanned, tables, log=discard))
    valid = tables.read("validated_dataset")
    _keep(tables, "aspect_buckets", assign_buckets(recipe, valid, log=discard))
    buckets = tables.read("aspect_buckets")
    _keep(tables, "vae_latents", cache_latents(recipe, buckets, tables, launch=in_process, log=discard))
    _keep(tables, "text_embeddings", cache_text(recipe, valid, tables, launch=in_process, log=discard))
    return recipe, changed


def training_job(recipe: Recipe, *, held_out: str | None = None) -> TrainingJob:
    """Return the job of a training on a recipe with complete caches, without previews.

    `held_out` is the dataset that the recipe's training does not see.
    """
    tables, entries = Tables(recipe.output_dir), RecipeEntries(recipe)
    inputs = training_inputs(recipe, entries, tables.read("vae_latents"), tables.read("text_embeddings"))
    if held_out is not None:
        inputs = TrainingInputs(inputs.table.with_columns(held_out=pl.col("dataset") == held_out))
    return TrainingJob(recipe, entries.model_folder, "0" * 16, inputs, entries.text_spec(""), ())


def _keep(tables: Tables, asset: str, result: StageResult) -> None:
    tables.write(asset, result.table)
    tables.write_rejected(asset, result.rejected)


class _Silent:
    """Receiver of the progress of a worker, which shows nothing."""

    def info(self, text: str) -> None: ...

    def phase(self, text: str) -> None: ...

    def progress(self, done: int, total: int, text: str, *, unit: str = "", note: str = "") -> None: ...


def in_process(module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
    """Run a worker in this process, because importing torch takes longer than the work on 48 pictures."""
    if meanwhile is not None:
        meanwhile()
    if module != TRAINING_MODULE:
        import_module(f"{module}.__main__").run(job_file, _Silent(), rank=0, num_ranks=1)
        return

    from pipeline.trained_lora.job import read_job
    from pipeline.trained_lora.worker.loop import train
    from pipeline.trained_lora.worker.stop_request import StopRequest

    train(read_job(job_file), _Silent(), StopRequest())
