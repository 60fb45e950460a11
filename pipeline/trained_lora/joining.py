"""Joining a training: where a machine finds the files of its job, and what the machine lacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import StoreError, TrainingError
from pipeline.storage.addresses import Address, Url
from pipeline.storage.atomic import write_bytes
from pipeline.storage.remote_folder import ACCESS_FIX, RemoteFolder
from pipeline.trained_lora.job import INPUTS_FILE, JOB_FILE

_JOB_FILES = (INPUTS_FILE, JOB_FILE)


def local_job_file(job: Address, folder: Path, *, rank: int) -> Path:
    """Return the path of a job file on the machine of this rank; files at an address are copied to `folder`.

    `job` is the job file or the folder of its run.

    Raises:
        TrainingError: A file is missing, or this is machine 0 and the job is at an address.
        StoreError: The address cannot be opened or read.
    """
    if isinstance(job, Url):
        # Machine 0 writes into the run's folder, so a copy of the job is not enough.
        if rank == 0:
            raise TrainingError(
                "machine 0 needs the run's folder on a disk, because it writes checkpoints there",
                where=str(job),
                fix="start machine 0 where the folder of the run is, and pass its path",
            )
        return _fetched(job, folder)

    file = (job / JOB_FILE if job.is_dir() else job).absolute()
    for path in (file, file.with_name(INPUTS_FILE)):
        if not path.is_file():
            raise _missing(path.name, str(path.parent))
    return file


def job_for_others(job_file: Path) -> str:
    """Return where machines other than 0 find a job: at the address of the outputs, if they have one."""
    job: dict[str, Any] = json.loads(job_file.read_text(encoding="utf-8"))
    outputs: str = job["recipe"]["output_address"]
    return f"{outputs.rstrip('/')}/runs/{job['run']}" if "://" in outputs else str(job_file)


def require_local_files(job_file: Path) -> None:
    """Raise TrainingError if the base model or the cache of a job is not on this machine."""
    job: dict[str, Any] = json.loads(job_file.read_text(encoding="utf-8"))
    for name, path in _needed(job):
        if not path.exists():
            raise TrainingError(
                f"{name} of the training does not exist on this machine",
                where=str(path),
                fix="use the same path on all machines, for example on a shared disk; a cache may also be at "
                "an address, and a base model from the Hub in the same HF_HOME",
            )


def _needed(job: dict[str, Any]) -> Iterator[tuple[str, Path]]:
    yield "the base model", Path(job["base"])
    for role, folder in job.get("elsewhere", {}).items():
        yield f"the {role}", Path(folder)
    if job.get("training_adapter"):
        yield "the training adapter", Path(job["training_adapter"])
    if context := job["recipe"].get("model", {}).get("context_lora"):
        yield "the context LoRA", Path(context["path"])
    cache_dir: str = job["recipe"]["cache_dir"]

    # A cache at an address is opened by the worker itself.
    if "://" not in cache_dir:
        yield "the cache", Path(cache_dir)


def _fetched(job: Url, folder: Path) -> Path:
    url = job.parent if job.name == JOB_FILE else job
    remote = RemoteFolder(url)
    for name in _JOB_FILES:
        try:
            write_bytes(folder / name, remote.read(name))
        except FileNotFoundError as err:
            raise _missing(name, str(url)) from err
        except OSError as err:
            raise StoreError(f"{name} cannot be read: {err}", where=str(url), fix=ACCESS_FIX) from err
    return folder / JOB_FILE


def _missing(name: str, where: str) -> TrainingError:
    return TrainingError(
        f"{name} does not exist at this path or address",
        where=where,
        fix=f"pass the path or address of {JOB_FILE} in a run's folder; if the machines share no disk, copy "
        f"{' and '.join(reversed(_JOB_FILES))} to this one",
    )
