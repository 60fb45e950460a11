"""Previews: pictures of a few prompts, drawn during training with the current adapter.

The prompts' text embeddings come from the cache, or from the trained text encoders. The VAE is loaded for the
previews and released afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accelerate.utils import gather_object
from diffusers import DDIMScheduler
from PIL.PngImagePlugin import PngInfo
from torch import Tensor, nn

from pipeline.images.decode import decode
from pipeline.images.geometry import Size
from pipeline.models.families.parts.noise import ZERO_SNR_DRAWING
from pipeline.models.worker.inference import PictureSettings
from pipeline.processes.worker.devices import free_memory, is_out_of_memory
from pipeline.storage.atomic import write_atomically
from pipeline.trained_lora.previews import PROMPT_KEY, preview_file
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker.adapter.lora import scaled_adapters
from pipeline.trained_lora.worker.loader import read_entry

if TYPE_CHECKING:
    from PIL.Image import Image

    from pipeline.cache.store import EntrySpec
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import Recipe
    from pipeline.trained_lora.job import TrainingJob
    from pipeline.trained_lora.prompts import Prompt
    from pipeline.trained_lora.worker.engine import Engine


def draw_divided_previews(
    job: TrainingJob, family: WorkerFamily, engine: Engine, *, step: int, warn: Callable[[str], None]
) -> list[Path]:
    """Divide `draw_previews` among all processes, which have the same weights; every process calls it.

    Every process returns the files of all, and reports the failures of all.
    """
    accelerator = engine.accelerator
    numbers = range(accelerator.process_index, len(job.prompts), accelerator.num_processes)
    failures: list[str] = []
    files = draw_previews(job, family, engine, step=step, warn=failures.append, numbers=numbers)

    files, failures = gather_object(files), gather_object(failures)
    for text in failures:
        warn(text)
    # By the number of the prompt, as one process draws them.
    return sorted(files, key=lambda file: (len(file.name), file.name))


def draw_previews(
    job: TrainingJob,
    family: WorkerFamily,
    engine: Engine,
    *,
    step: int,
    warn: Callable[[str], None],
    numbers: Sequence[int] | None = None,
) -> list[Path]:
    """Draw the run's prompts into `samples/step-<step>-<number>.png`, and return the files written.

    A preview depends only on the adapter, the prompt with its settings and the recipe's seed, so that steps
    can be compared. A failure is reported through `warn` and ends the drawing. `numbers` are the prompts to
    draw; None for all.
    """
    numbers = range(len(job.prompts)) if numbers is None else numbers
    pending = list(numbers)
    try:
        # If memory runs out, the VAE decodes the remaining pictures in tiles and in bfloat16.
        if pending and not _draw_all(job, family, engine, step, pending, dtype="float32"):
            free_memory()
            _draw_all(job, family, engine, step, pending, dtype="bfloat16")
    except Exception as err:  # a failed preview must not end a run (FAILURES R09)
        warn(f"a preview of step {step} could not be drawn: {type(err).__name__}: {err}")
    finally:
        free_memory()  # the pipeline is part of a reference cycle and would keep the VAE on the GPU
    folder = RunLayout(job.folder).previews
    return [preview_file(folder, step, number) for number in numbers if number not in pending]


def _draw_all(
    job: TrainingJob, family: WorkerFamily, engine: Engine, step: int, pending: list[int], *, dtype: str
) -> bool:
    """Draw the prompts `pending` and remove each; return False if memory runs out with float32."""
    # Neither attempt uses float16, in which SDXL's VAE overflows.
    is_last = dtype != "float32"
    try:
        with engine.objective.evaluation():
            device = str(engine.accelerator.device)
            pipeline = load_drawing_pipeline(
                family, job.recipe, denoiser=engine.denoiser, dtype=dtype, device=device
            )
            if is_last:
                pipeline.vae.enable_tiling()

            while pending:
                number, prompt = pending[0], job.prompts[pending[0]]
                with scaled_adapters(engine.networks, prompt.lora_scale):
                    picture = _draw(job, family, engine, pipeline=pipeline, prompt=prompt)

                path = preview_file(RunLayout(job.folder).previews, step, number)

                # Readers of the file, such as the sheet of the run, need no recipe for its heading.
                text_chunks = PngInfo()
                for key, text in {PROMPT_KEY: prompt.caption, **prompt.settings()}.items():
                    text_chunks.add_itxt(key, text)
                write_atomically(path, partial(picture.save, format="PNG", pnginfo=text_chunks))
                del pending[0]
    except (RuntimeError, MemoryError) as err:
        if is_last or not is_out_of_memory(err):
            raise
        return False
    return True


def load_drawing_pipeline(
    family: WorkerFamily, recipe: Recipe, *, denoiser: nn.Module, dtype: str, device: str
) -> Any:
    """Return the family's pipeline with the noise schedule of the recipe's training."""
    pipeline = family.drawing.load_pipeline(denoiser=denoiser, dtype=dtype, device=device)

    # The only setting that changes the schedule (FAILURES R13): a shift is a density of training.
    if recipe.training.noise.zero_terminal_snr or family.loses_zero_snr:
        scheduler_class = cast("Any", DDIMScheduler)
        pipeline.scheduler = scheduler_class.from_config(pipeline.scheduler.config, **ZERO_SNR_DRAWING)
    return pipeline


def _draw(job: TrainingJob, family: WorkerFamily, engine: Engine, *, pipeline: Any, prompt: Prompt) -> Image:
    def tensors(caption: str, entry: EntrySpec) -> Mapping[str, Tensor]:
        # Cached embeddings come from the untrained text encoders.
        return engine.embed_caption(caption) or read_entry(job.store, entry, f"prompt {caption!r}")

    negative = prompt.negative
    return family.drawing.draw(
        pipeline,
        tensors(prompt.caption, prompt.text),
        tensors("", job.empty_text),
        picture_settings(prompt, seed=job.recipe.training.seed),
        negative_text=None if negative is None else tensors(negative.caption, negative.text),
        references=open_references(prompt, job.recipe),
    )


def open_references(prompt: Prompt, recipe: Recipe) -> list[Image]:
    """Return the reference images of a prompt, upright and RGB."""
    background, max_px = recipe.latents.background, recipe.checks.max_image_pixels
    return [decode(path, background, max_px=max_px) for path in prompt.references]


def picture_settings(prompt: Prompt, *, seed: int) -> PictureSettings:
    """Return how a prompt's picture is drawn, with `seed` unless the prompt has its own."""
    own_seed = seed if prompt.seed is None else prompt.seed
    return PictureSettings(Size(*prompt.size_hw), prompt.steps, own_seed, prompt.guidance_scale)
