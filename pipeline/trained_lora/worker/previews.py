"""Sample pictures while training: what the adapter makes of a few captions by now.

They are drawn from cached text embeddings, or what trained text encoders make of the captions; the VAE is
loaded for them and dropped again. A picture that cannot be drawn is a warning, never the end of a run
(FAILURES R09).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cache.remote_store import store_at
from pipeline.images.geometry import Size
from pipeline.processes.worker.devices import free_memory
from pipeline.storage.atomic import write_atomically
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker.loader import read_entry

if TYPE_CHECKING:
    from PIL.Image import Image

    from pipeline.models.worker.family import WorkerFamily
    from pipeline.trained_lora.job import Prompt, TrainingJob
    from pipeline.trained_lora.worker.engine import Engine

DRAWING_STEPS = 20


def draw_previews(
    order: TrainingJob, family: WorkerFamily, engine: Engine, *, step: int, warn: Callable[[str], None]
) -> list[Path]:
    """Draw each of the order's prompts into `samples/step-<step>-<number>.png`.

    A picture depends on the adapter, its prompt and the recipe's seed: those of two steps can be compared.
    The model's mode is as before.

    Args:
        order: Names prompts, sizes and the seed.
        family: Draws.
        engine: Holds the denoiser with its adapter.
        step: Optimizer steps done; part of the names.
        warn: Takes what went wrong.

    Returns:
        The files written; fewer than there are prompts when something went wrong.
    """
    drawn: list[Path] = []
    try:
        with engine.evaluation():
            for path in _drawn(order, family, engine, step):
                drawn.append(path)  # what was drawn before one fails counts
    except Exception as err:  # whatever a preview dies of, training goes on
        warn(f"a sample picture of step {step} could not be drawn: {type(err).__name__}: {err}")
    finally:
        free_memory()  # of the VAE, which a pipeline that holds itself would keep on the GPU
    return drawn


def _drawn(order: TrainingJob, family: WorkerFamily, engine: Engine, step: int) -> Iterator[Path]:
    device = str(engine.accelerator.device)
    pipeline = family.drawing.load_pipeline(denoiser=engine.denoiser, dtype="float32", device=device)
    for number, path in enumerate(_paths(order, step)):
        picture = _picture(order, family, engine, pipeline=pipeline, prompt=order.prompts[number])
        write_atomically(path, partial(picture.save, format="PNG"))
        yield path


def _paths(order: TrainingJob, step: int) -> list[Path]:
    folder = RunLayout(order.folder).samples
    return [folder / f"step-{step:08d}-{number:02d}.png" for number in range(len(order.prompts))]


def _picture(
    order: TrainingJob, family: WorkerFamily, engine: Engine, *, pipeline: Any, prompt: Prompt
) -> Image:
    store = store_at(order.recipe.cache_dir)
    text, empty_text = engine.embed_caption(prompt.caption), engine.embed_caption("")
    return family.drawing.draw(
        pipeline,
        text or read_entry(store, prompt.text, f"prompt {prompt.caption!r}"),
        empty_text or read_entry(store, order.empty_text, "the empty caption"),
        size=Size(*prompt.size_hw),
        steps=DRAWING_STEPS,
        seed=order.recipe.training.seed,
    )
