"""Text embeddings of the prompts: from the cache, or encoded now without storing them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from pipeline.cache.remote_store import store_at
from pipeline.cache.store import EntrySpec
from pipeline.cache.worker.tensors import from_stored
from pipeline.encoding.jobs import Encoded, Job, Order
from pipeline.encoding.progress import Progress
from pipeline.processes.worker.devices import free_memory
from pipeline.text_embeddings.worker.encoder import TextEncoder
from pipeline.trained_lora.worker.loader import read_entry

if TYPE_CHECKING:
    from pipeline.encoding.progress import Report
    from pipeline.trained_lora.drawing.job import DrawingJob

Texts = Mapping[str, Mapping[str, Tensor]]
"""Tensors of a caption's entry as float32, by caption."""


def prompt_texts(job: DrawingJob, device: str, report: Report, *, scratch: Path) -> Texts:
    """Return the tensors of the job's prompts, negative prompts and of the empty caption.

    The recipe's own prompts are in the cache. Others are encoded in the dtypes of the cache, so that their
    pictures do not change when the recipe adopts them.

    Raises:
        ModelError: An encoder's values are not finite.
        LaunchError: The text encoders do not fit into memory.
    """
    store = store_at(job.recipe.cache_dir)
    specs = {"": job.empty_text}
    for prompt in job.prompts:
        specs |= prompt.entries()
    missing = {caption: spec for caption, spec in specs.items() if not store.check(spec).valid}
    texts: dict[str, Mapping[str, Tensor]] = {
        caption: read_entry(store, spec, f"prompt {caption!r}")
        for caption, spec in specs.items()
        if caption not in missing
    }
    if missing:
        texts |= _encoded(
            job, missing, device, Progress(report, scratch, jobs=missing, what="prompts encoded", rank=0)
        )
        free_memory()
    return texts


def _encoded(
    job: DrawingJob, specs: Mapping[str, EntrySpec], device: str, progress: Progress
) -> dict[str, Mapping[str, Tensor]]:
    """Encode captions as the cache stage does."""
    order = Order(
        kind="text",
        model_folder=job.base,
        store_root=job.recipe.cache_dir,
        settings={"compute_dtype": job.recipe.text.compute_dtype},
        jobs=[
            Job(spec, {}, {"caption": caption}, f"the prompt {caption[:60]!r}", 1)
            for caption, spec in specs.items()
        ],
        component_folders=job.component_folders,
    )

    progress.phase("loading the text encoders")
    encoder = TextEncoder(order, device, progress)
    texts: dict[str, Mapping[str, Tensor]] = {}
    for each, outcome in encoder.encoded(order.jobs, store_at(job.recipe.cache_dir)):
        assert isinstance(outcome, Encoded), f"{each.name} appeared in the cache"
        texts[each.work["caption"]] = {
            name: from_stored(values).float() for name, values in outcome.tensors.items()
        }
    return texts
