"""Previews: pictures of a few prompts, drawn during training with the current adapter.

The prompts' text embeddings come from the cache, or from the trained text encoders. The VAE is loaded for the
previews and released afterwards. A preview that fails is a warning and never ends a run (FAILURES R09).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL.PngImagePlugin import PngInfo

from pipeline.cache.remote_store import store_at
from pipeline.images.geometry import Size
from pipeline.processes.worker.devices import free_memory
from pipeline.storage.atomic import write_atomically
from pipeline.trained_lora.previews import PROMPT_KEY, preview_file
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker.loader import read_entry

if TYPE_CHECKING:
    from PIL.Image import Image

    from pipeline.models.worker.family import WorkerFamily
    from pipeline.trained_lora.job import Prompt, TrainingJob
    from pipeline.trained_lora.worker.engine import Engine

INFERENCE_STEPS = 20
"""Denoising steps per preview."""


def draw_previews(
    job: TrainingJob, family: WorkerFamily, engine: Engine, *, step: int, warn: Callable[[str], None]
) -> list[Path]:
    """Draw each of the run's prompts into `samples/step-<step>-<number>.png`, which also holds the prompt.

    A preview depends only on the adapter, the prompt and the recipe's seed, so that steps can be compared.

    `warn` receives a warning if drawing fails.

    Returns:
        The files written, in the order of the prompts; fewer than the prompts after a failure.
    """
    files: list[Path] = []
    try:
        with engine.evaluation():
            # float32, because SDXL's VAE overflows in float16.
            device = str(engine.accelerator.device)
            pipeline = family.drawing.load_pipeline(denoiser=engine.denoiser, dtype="float32", device=device)
            for number, prompt in enumerate(job.prompts):
                picture = _draw(job, family, engine, pipeline=pipeline, prompt=prompt)
                path = preview_file(RunLayout(job.folder).samples, step, number)
                text_chunks = PngInfo()
                text_chunks.add_itxt(PROMPT_KEY, prompt.caption)
                write_atomically(path, partial(picture.save, format="PNG", pnginfo=text_chunks))
                files.append(path)
    except Exception as err:  # training continues whatever the failure
        warn(f"a preview of step {step} could not be drawn: {type(err).__name__}: {err}")
    finally:
        free_memory()  # the pipeline is part of a reference cycle and would keep the VAE on the GPU
    return files


def _draw(job: TrainingJob, family: WorkerFamily, engine: Engine, *, pipeline: Any, prompt: Prompt) -> Image:
    store = store_at(job.recipe.cache_dir)
    text, empty_text = engine.embed_caption(prompt.caption), engine.embed_caption("")
    return family.drawing.draw(
        pipeline,
        text or read_entry(store, prompt.text, f"prompt {prompt.caption!r}"),
        empty_text or read_entry(store, job.empty_text, "the empty caption"),
        size=Size(*prompt.size_hw),
        steps=INFERENCE_STEPS,
        seed=job.recipe.training.seed,
    )
