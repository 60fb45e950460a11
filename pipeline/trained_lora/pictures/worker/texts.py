"""Text embeddings of the prompts: from the cache, or encoded now without storing them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import Store
from pipeline.cache.worker.tensors import from_stored
from pipeline.encoding.jobs import Encoded, Encoding, Failure, Job
from pipeline.encoding.progress import Progress
from pipeline.errors import DrawingError
from pipeline.processes.worker.devices import free_memory
from pipeline.text_embeddings.caption_rows import file_images
from pipeline.text_embeddings.stage import text_settings
from pipeline.text_embeddings.worker.encoder import TextEncoder
from pipeline.trained_lora.worker.loader import read_entry

if TYPE_CHECKING:
    from pipeline.encoding.progress import Report
    from pipeline.trained_lora.pictures.job import DrawingJob

Texts = Mapping[str, Mapping[str, Tensor]]
"""Tensors of a caption's entry as float32, by the entry's key."""


def prompt_texts(job: DrawingJob, device: str, report: Report, *, scratch: Path) -> Texts:
    """Return the tensors of the job's prompts, negative prompts and of the empty caption.

    Raises:
        DrawingError: A reference image has changed or cannot be read.
        ModelError: An encoder's values are not finite.
        LaunchError: The text encoders do not fit into memory.
    """
    store = Store(job.recipe.cache_dir)
    jobs = {each.spec.key: each for each in _jobs(job)}
    # Only the recipe's own prompts are in the cache. Other prompts are encoded in the dtypes of the cache, so
    # that their pictures do not change when the recipe adopts them.
    missing = {key: each for key, each in jobs.items() if not store.check(each.spec).valid}
    texts: dict[str, Mapping[str, Tensor]] = {
        key: read_entry(store, each.spec, each.name) for key, each in jobs.items() if key not in missing
    }
    if missing:
        progress = Progress(report, scratch, jobs=missing, what="prompts encoded", rank=0)
        texts |= _encoded(job, list(missing.values()), device, progress)
        free_memory()
    return texts


def _jobs(job: DrawingJob) -> Iterator[Job]:
    """Yield the jobs that encode the prompts, their negative prompts and the empty caption."""
    yield Job(job.empty_text, {}, {"caption": ""}, "the empty caption", 1)
    entries = RecipeEntries(job.recipe)
    for prompt in job.prompts:
        _, files = file_images(entries, prompt.references)
        images = {} if files is None else {"images": json.loads(files)}
        for each in prompt.entries():
            name = f"the prompt {each.caption[:60]!r}"
            seen = images if each.text == prompt.text or entries.sees_images_in_negative else {}
            yield Job(each.text, {}, {"caption": each.caption, **seen}, name, 1)


def _encoded(
    job: DrawingJob, missing: list[Job], device: str, progress: Progress
) -> dict[str, Mapping[str, Tensor]]:
    """Encode captions as the cache stage does."""
    encoding = Encoding(
        kind="text",
        model_folder=job.base,
        store_root=job.recipe.cache_dir,
        settings=text_settings(job.recipe),
        jobs=missing,
        component_folders=job.component_folders,
    )

    progress.phase("loading the text encoders")
    encoder = TextEncoder(encoding, device, progress)
    texts: dict[str, Mapping[str, Tensor]] = {}
    for each, outcome in encoder.encoded(encoding.jobs, Store(job.recipe.cache_dir)):
        if isinstance(outcome, Failure):
            raise DrawingError(outcome.detail, where=each.name, fix=outcome.fix)
        assert isinstance(outcome, Encoded), f"{each.name} appeared in the cache"
        texts[each.spec.key] = {name: from_stored(values).float() for name, values in outcome.tensors.items()}
    return texts
