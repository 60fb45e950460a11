"""What each launched process does: makes its share of an order's entries. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from pipeline.cache.remote_store import store_at
from pipeline.cache.store import Store
from pipeline.encoding.jobs import Beside, Job, Meeting, Order, ResultsWriter, read_order, share
from pipeline.encoding.outcome import Encoded, Outcome
from pipeline.encoding.prefetch import Behind
from pipeline.encoding.progress import Progress, Report
from pipeline.processes.launch import cpu_threads
from pipeline.processes.worker.devices import own_device, why_no_gpu

WRITES_BEHIND = 16
"""Entries that may wait to be written while the next are encoded."""

WRITING_THREADS = 4
"""Each mostly waits for the disk to say that an entry is safe; one after the other that takes 1 to 3 ms an
entry, which is more than a small model needs to make one."""


class Encoder(Protocol):
    """Encodes the entries of one stage on one device."""

    def encoded(self, jobs: Iterable[Job], store: Store, /) -> Iterator[tuple[Job, Outcome]]:
        """Yield each job with its tensors or the reason for its failure."""
        ...


AnyEncoder = TypeVar("AnyEncoder", bound=Encoder)


def run(
    order_file: Path,
    report: Report,
    *,
    rank: int,
    num_ranks: int,
    open_encoder: Callable[[Order, str, Progress], AnyEncoder],
    show: Callable[[Beside, AnyEncoder, Store, Progress], None] | None = None,
) -> None:
    """Encode this process's share of the order; results go next to the order file, entries into its store.

    Args:
        order_file: JSON file written by `pipeline.encoding.fill`.
        report: Receives progress and warnings.
        rank: Index of this process, from 0.
        num_ranks: Number of processes that share the order.
        open_encoder: Loads the model for an order onto a device.
        show: Called after encoding with the jobs whose result the report shows.

    Raises:
        StoreError: An entry could not be written.
        ModelError: The model cannot be loaded, or a text encoder returns values that are not finite.
        LaunchError: This process has no GPU, or memory ran out.
    """
    torch.set_num_threads(cpu_threads())
    order = read_order(order_file)
    looked_at = set[str]() if order.beside is None else order.beside.keys
    ordered = Meeting(order.jobs, looked_at)
    store, jobs = store_at(order.store_root), Meeting(share(ordered, rank, num_ranks), looked_at)
    what = "latents" if order.kind == "latents" else "text embeddings"
    with (
        ResultsWriter(order_file, rank) as results,
        Progress(report, order_file.parent, jobs=order.jobs, what=f"{what} encoded", rank=rank) as progress,
    ):
        device = own_device()
        if device != "cpu":
            torch.cuda.set_device(device)  # else pinned memory makes each process a context on the first GPU
        if (reason := why_no_gpu()) is not None:
            progress.say(f"warning: {reason}")
        encoder = open_encoder(order, device, progress)
        progress.working_on("waiting for the list of what is missing")
        len(order.jobs)
        started_s = time.perf_counter()
        make_all(encoder.encoded(jobs, store), store, results=results, progress=progress)
        made_s = time.perf_counter()
        if order.beside is not None and show is not None:
            mine = jobs.met if rank else jobs.met | (order.beside.keys - ordered.met)
            show(order.beside.of(mine), encoder, store, progress)
        results.finish(made_s - started_s, aside_s=time.perf_counter() - made_s)


def make_all(
    outcomes: Iterator[tuple[Job, Outcome]], store: Store, *, results: ResultsWriter, progress: Progress
) -> None:
    """Write each entry as it comes, beside the encoding of the next.

    Raises:
        StoreError: An entry could not be written.
    """
    writes = Behind(WRITES_BEHIND, threads=WRITING_THREADS)
    try:
        for job, outcome in outcomes:
            writes.put(partial(_end, job, outcome, store=store, results=results, progress=progress))
    finally:
        writes.finish()


def _end(job: Job, outcome: Outcome, *, store: Store, results: ResultsWriter, progress: Progress) -> None:
    if isinstance(outcome, Encoded):
        won = store.write(job.spec, outcome.tensors, {**job.facts, **outcome.facts})
        results.ended(job.spec.key, "made" if won else "present")
    else:
        results.ended(job.spec.key, outcome)
    progress.ended()
