"""What each launched process does: makes its share of an order's entries. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.devices import own_device, why_no_gpu
from pipeline.encode.feed import Behind
from pipeline.encode.order import Job, Meeting, ResultsWriter, read_order, share
from pipeline.encode.outcome import Encoded, Outcome
from pipeline.encode.progress import Progress, Report
from pipeline.launching import cpu_threads
from pipeline.store import Store
from pipeline.store_elsewhere import store_at

if TYPE_CHECKING:
    from pipeline.encode.latent_encoder import LatentEncoder

WRITES_BEHIND = 16
"""Entries that may wait to be written while the next are encoded."""

WRITING_THREADS = 4
"""Each mostly waits for the disk to say that an entry is safe; one after the other that takes 1 to 3 ms an
entry, which is more than a small model needs to make one."""


def run(order_file: Path, report: Report, *, rank: int, num_ranks: int) -> None:
    """Make this process's share of the order; results go beside the order, entries into its store.

    Raises:
        StoreError: An entry could not be written.
        ModelError: The model cannot be loaded, or makes no finite numbers of text.
        LaunchError: There is no GPU for this process, or memory ran out.
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
        latents: LatentEncoder | None = None
        if order.kind == "latents":
            from pipeline.encode.latent_encoder import LatentEncoder

            encoder = latents = LatentEncoder(order, device, progress)
        else:
            from pipeline.encode.text_encoder import TextEncoder

            encoder = TextEncoder(order, device, progress)
        progress.working_on("waiting for the list of what is missing")
        len(order.jobs)
        started_s = time.perf_counter()
        make_all(encoder.encoded(jobs, store), store, results=results, progress=progress)
        made_s = time.perf_counter()
        if order.beside is not None and latents is not None:
            from pipeline.encode.decoding import decode_beside

            mine = jobs.met if rank else jobs.met | (order.beside.keys - ordered.met)
            decode_beside(order.beside.of(mine), latents, store, progress)
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
