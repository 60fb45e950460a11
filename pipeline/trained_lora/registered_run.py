"""Registration of a run in the cache: `latentline gc` on any machine keeps the entries that the run reads.

A training registers before its processes start. The registration is deleted when the run has finished, and
when `latentline gc --keep-runs` deletes its folder. `latentline gc` deletes one that was left behind.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import polars as pl

from pipeline.cache.users import register_run, unregister_run
from pipeline.errors import StoreError
from pipeline.storage.addresses import Address, address
from pipeline.storage.os_errors import is_write_denied
from pipeline.trained_lora.job import JOB_FILE, TrainingJob
from pipeline.trained_lora.samples import entry_keys

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.reporting.reports import Log


def run_entry_keys(job: TrainingJob) -> pl.Series:
    """Return the keys of all entries that a run reads: of its inputs, empty caption and preview prompts."""
    captions = [entry.text.key for prompt in job.prompts for entry in prompt.entries()]
    texts = pl.Series("key", [job.empty_text.key, *captions], dtype=pl.String)
    return pl.concat([entry_keys(job.inputs.table), texts])


def register_entries(job: TrainingJob, *, log: Log) -> None:
    """Register the entries that a run reads.

    Args:
        job: Job of the run.
        log: Receives a warning if the cache is read-only, where the training can still read its entries.

    Raises:
        StoreError: The cache cannot be written for another reason.
    """
    recipe, keys = job.recipe, run_entry_keys(job)
    try:
        register_run(recipe.cache_dir, recipe.registered_output, recipe=recipe.name, run=job.run, keys=keys)
    except StoreError as err:
        if not is_write_denied(err.__cause__):
            raise
        log(
            f"warning: {err.what} ({err.where}); do not run latentline gc --delete on another machine until "
            "the training has finished"
        )


def unregister_entries(cache_dir: Address, output_dir: Address, run: str, *, log: Log) -> None:
    """Delete the registration of a run; a failure is only logged, because no entry is lost.

    Args:
        cache_dir: Cache of the run.
        output_dir: Output folder, as it was registered.
        run: Run id.
        log: Receives a warning.
    """
    try:
        unregister_run(cache_dir, output_dir, run)
    except (StoreError, OSError) as err:
        reason = f"{err.what} ({err.where}); {err.fix}" if isinstance(err, StoreError) else str(err)
        log(
            f"warning: the entries of run {run} stay registered until latentline gc --delete can delete the "
            f"registration: {reason}"
        )


def unregister_folder(folder: Path, output_dir: Address, *, log: Log) -> None:
    """Delete the registration of the run in a folder, if the folder states its cache.

    Args:
        folder: Folder of the run.
        output_dir: Output folder, as it was registered.
        log: Receives a warning if the registration cannot be deleted.
    """
    try:
        job = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
        cache_dir = address(job["recipe"]["cache_dir"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # the run never started
    unregister_entries(cache_dir, output_dir, folder.name, log=log)
