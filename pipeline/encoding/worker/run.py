"""Main function of an encoding process: encode its share of an encoding's entries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from pipeline.cache.store import Kind, Store
from pipeline.encoding.jobs import (
    DESCRIPTIONS,
    Encoded,
    Encoding,
    Job,
    Outcome,
    PictureJobs,
    ResultsWriter,
    read_encoding,
    share,
)
from pipeline.encoding.prefetch import Behind
from pipeline.encoding.progress import Progress, Report
from pipeline.images.decoder_warnings import counted_warnings
from pipeline.processes.launch import cpu_threads
from pipeline.processes.worker.devices import allow_tf32, own_device

WRITES_BEHIND = 16
"""Maximum number of entries that wait to be written while the next are encoded."""

# Syncing an entry takes 1 to 3 ms, more than a small model needs to encode it.
WRITING_THREADS = 4
"""Number of writing threads."""


_LOADING: dict[Kind, str] = {
    "latents": "loading the VAE",
    "text": "loading the text encoders",
    "pictures": "loading the base model",
    "features": "loading the scorers",
    "diagnoses": "loading the base model",
    "influences": "loading the base model",
    "captions": "loading the captioning model",
}


class Encoder(Protocol):
    """Encodes the entries of one stage on one device."""

    def encoded(self, jobs: Iterable[Job], store: Store, /) -> Iterator[tuple[Job, Outcome]]:
        """Yield each job with its outcome."""
        ...


AnyEncoder = TypeVar("AnyEncoder", bound=Encoder)


class _RecordKeys:
    """Iterates over jobs, and records which of some keys have come by."""

    def __init__(self, jobs: Iterable[Job], keys: set[str]) -> None:
        self._jobs = jobs
        self._keys = keys
        self.seen: set[str] = set()

    def __iter__(self) -> Iterator[Job]:
        for job in self._jobs:
            if job.spec.key in self._keys:
                self.seen.add(job.spec.key)
            yield job


def run(
    encoding_file: Path,
    report: Report,
    *,
    rank: int,
    num_ranks: int,
    open_encoder: Callable[[Encoding, str, Progress], AnyEncoder],
    draw: Callable[[PictureJobs, AnyEncoder, Store, Progress], None] | None = None,
) -> None:
    """Encode this rank's share of the encoding; results go to the encoding's folder, entries to its store.

    `open_encoder` loads the model for an encoding onto a device. `draw` draws the report's pictures after
    encoding.

    Raises:
        StoreError: An entry could not be written.
        ModelError: The model cannot be loaded, or a text encoder returns values that are not finite.
        LaunchError: This process has no GPU, torch cannot use it, or memory ran out.
    """
    # Not the number of cores, because the number of threads changes the last bits of results on a CPU.
    torch.set_num_threads(cpu_threads())
    encoding = read_encoding(encoding_file)
    store = Store(encoding.store_root)

    # The keys are recorded while the jobs stream by, because the list of jobs may not fit into memory.
    picture_keys = set[str]() if encoding.pictures is None else encoding.pictures.keys
    all_jobs = _RecordKeys(encoding.jobs, picture_keys)
    own_jobs = _RecordKeys(share(all_jobs, rank, num_ranks), picture_keys)

    with (
        ResultsWriter(encoding_file, rank) as results,
        Progress(
            report, encoding_file.parent, jobs=encoding.jobs, what=DESCRIPTIONS[encoding.kind], rank=rank
        ) as progress,
        counted_warnings(progress.say),
    ):
        device = _prepare_device()
        progress.phase(_LOADING[encoding.kind])
        encoder = open_encoder(encoding, device, progress)
        progress.phase("waiting for the list of missing entries")
        # The stage may still be checking entries; its list of jobs is awaited here, after the model is
        # loaded.
        len(encoding.jobs)

        start_s = time.perf_counter()
        write_outcomes(encoder.encoded(own_jobs, store), store, results=results, progress=progress)
        encoded_s = time.perf_counter()

        if encoding.pictures is not None and draw is not None:
            # Each rank draws the latents that it encoded, and rank 0 also the latents of earlier runs.
            own_keys = own_jobs.seen if rank else own_jobs.seen | (picture_keys - all_jobs.seen)
            draw(encoding.pictures.select(own_keys), encoder, store, progress)
        results.finish(encoded_s - start_s, aside_s=time.perf_counter() - encoded_s)


def _prepare_device() -> str:
    device = own_device()
    if device != "cpu":
        # Without this, pinning memory would create a context of each process on the first GPU.
        torch.cuda.set_device(device)
    allow_tf32(device)
    return device


def write_outcomes(
    outcomes: Iterator[tuple[Job, Outcome]], store: Store, *, results: ResultsWriter, progress: Progress
) -> None:
    """Write each entry in the background while the next is encoded; raises StoreError as `Store.write`."""
    writes = Behind(WRITES_BEHIND, threads=WRITING_THREADS)
    try:
        for job, outcome in outcomes:
            writes.put(partial(_write, job, outcome, store=store, results=results, progress=progress))
    finally:
        writes.finish()


def _write(job: Job, outcome: Outcome, *, store: Store, results: ResultsWriter, progress: Progress) -> None:
    if isinstance(outcome, Encoded):
        written = store.write(job.spec, outcome.tensors, {**job.facts, **outcome.facts})

        # After the write, so that a process that is killed has reported no entry that does not exist.
        results.ended(job.spec.key, "made" if written else "present")
    else:
        results.ended(job.spec.key, outcome)
    progress.ended()
