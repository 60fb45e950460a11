"""Drawing the pictures of a job with one loaded base model, by the arithmetic of previews during training.

The same LoRA, prompt and seed give the same picture as a preview. On the CPU they are equal bit for bit, with
three exceptions: the files of LoHa, LoKr, PiSSA and OLoRA hold a converted LoRA, `lora.save_dtype` rounds a
file, and `compile` trains compiled blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import Store
from pipeline.cache.worker.tensors import from_stored
from pipeline.encoding.jobs import Encoded, Encoding, Failure, Job
from pipeline.encoding.progress import Progress
from pipeline.errors import DrawingError
from pipeline.models.worker.family import load_family
from pipeline.processes.worker.devices import (
    allow_tf32,
    free_memory,
    out_of_memory_as,
    own_device,
)
from pipeline.storage.atomic import write_atomically
from pipeline.text_embeddings.caption_rows import file_images
from pipeline.text_embeddings.stage import text_settings
from pipeline.text_embeddings.worker.encoder import TextEncoder
from pipeline.trained_lora.pictures.job import Cell, DrawingJob
from pipeline.trained_lora.pictures.worker.file_adapter import adapts_text_encoders, add_file
from pipeline.trained_lora.previews import PROMPT_KEY, number_text
from pipeline.trained_lora.worker.adapter.lora import adapted_networks
from pipeline.trained_lora.worker.adapter.warm_start import read_lora_tensors
from pipeline.trained_lora.worker.context_lora import load_base_with_context
from pipeline.trained_lora.worker.distributed import make_accelerator
from pipeline.trained_lora.worker.draw_previews import (
    load_drawing_pipeline,
    open_references,
    picture_settings,
)
from pipeline.trained_lora.worker.loader import read_entry
from pipeline.trained_lora.worker.memory.resident_blocks import least_free_bytes, resident_blocks
from pipeline.trained_lora.worker.text_encoders import TextEncoders

if TYPE_CHECKING:
    from PIL.Image import Image

    from pipeline.cache.store import EntrySpec
    from pipeline.encoding.progress import Report


def draw_pictures(job: DrawingJob, report: Report, *, scratch: Path) -> None:
    """Draw each picture of the job into its file, by LoRA, strength and prompt.

    Raises:
        DrawingError: A LoRA does not fit the base model, or memory ran out.
        ModelError: The base model cannot be loaded.
        TrainingError: The quantization needs a missing package or GPU.
    """
    allow_tf32(own_device())  # fails with a clear message before CUDA would fail with an obscure one
    cells = list(job.cells())
    with out_of_memory_as(partial(drawing_memory_error, job)):
        artist = Artist(job, report, scratch)

        # Pictures without the LoRA are the same for all steps, and are drawn once.
        without_lora: dict[int, Image] = {}
        report.progress(0, len(cells), "drawing pictures")
        for done, cell in enumerate(cells, start=1):
            has_lora = cell.strength * job.prompts[cell.number].lora_scale != 0.0
            picture = None if has_lora else without_lora.get(cell.number)
            if picture is None:
                picture = artist.draw(cell)
            if not has_lora:
                without_lora[cell.number] = picture
            write_atomically(cell.path, partial(picture.save, format="PNG", pnginfo=_text_chunks(job, cell)))
            report.progress(done, len(cells), "drawing pictures")


class Artist:
    """The base model of a job with its LoRA, and the pipeline that draws with it."""

    def __init__(self, job: DrawingJob, report: Report, scratch: Path) -> None:
        """Load everything; `scratch` is an empty folder for the progress of encoding the prompts.

        Raises:
            DrawingError: A LoRA does not fit the base model, or memory ran out.
            ModelError: The base model cannot be loaded.
            TrainingError: The quantization needs a missing package or GPU.
        """
        self._job = job
        self._family = load_family(job.base, job.component_folders)
        settings = job.recipe.accelerate
        precision = self._family.mixed_precision(settings.mixed_precision)
        self._accelerator = make_accelerator(
            settings, mixed_precision=precision, find_unused_parameters=False
        )
        device = str(self._accelerator.device)
        file = read_lora_tensors(job.loras[0].file)
        has_text = adapts_text_encoders(file)

        # The text encoders of a large model do not fit next to its denoiser, so they are loaded before it.
        self._texts = {} if has_text else prompt_texts(job, device, report, scratch=scratch)
        report.phase(f"loading the {'UNet' if self._family.spec.denoiser_name == 'unet' else 'transformer'}")
        resident = resident_blocks(self._family, job.recipe, least_free_bytes(self._accelerator.device))
        self._denoiser = load_base_with_context(self._family, resident.applied(job.recipe), device)
        self._text: TextEncoders | None = None
        if has_text:
            report.phase("loading the text encoders")
            self._text = TextEncoders(self._family, job.recipe, device)

        report.phase("adding the LoRA")
        text_networks = self._text.networks if self._text else {}
        networks = adapted_networks(self._denoiser, text_networks)
        self._adapter = add_file(self._family, networks, file)
        self._loaded = job.loras[0]
        for network in networks.values():
            network.eval()
        if self._text is None:
            # As in training: mixed precision then returns float32. Trained text encoders and the denoiser are
            # prepared as one module there, which does not change the denoiser's own forward.
            self._accelerator.prepare_model(self._denoiser, evaluation_mode=True)

        report.phase("loading the VAE")
        # float32, because SDXL's VAE overflows in float16.
        self._pipeline = load_drawing_pipeline(
            self._family, job.recipe, denoiser=self._denoiser, dtype="float32", device=device
        )

    def draw(self, cell: Cell) -> Image:
        """Return the picture of a cell of the job."""
        if cell.lora != self._loaded:
            self._adapter.load(cell.lora.file)
            self._loaded = cell.lora
        prompt = self._job.prompts[cell.number]
        self._adapter.set_strength(cell.strength * prompt.lora_scale)

        negative = prompt.negative
        # One autocast context per picture: autocast caches the cast weights for as long as it is active.
        with torch.no_grad(), self._accelerator.autocast():
            return self._family.drawing.draw(
                self._pipeline,
                self._tensors(prompt.caption, prompt.text),
                self._tensors("", self._job.empty_text),
                picture_settings(prompt, seed=self._job.seed),
                negative_text=None if negative is None else self._tensors(negative.caption, negative.text),
                references=open_references(prompt, self._job.recipe),
            )

    def _tensors(self, caption: str, entry: EntrySpec) -> Mapping[str, Tensor]:
        if self._text is None:
            return self._texts[entry.key]
        return {name: tensor[0] for name, tensor in self._text.embed([caption]).items()}


def prompt_texts(
    job: DrawingJob, device: str, report: Report, *, scratch: Path
) -> dict[str, Mapping[str, Tensor]]:
    """Return the float32 tensors of prompts, negative prompts and the empty caption, by key of the entry.

    Raises:
        DrawingError: A reference image has changed or cannot be read.
        ModelError: An encoder's values are not finite.
        LaunchError: The text encoders do not fit into memory.
    """
    store = Store(job.recipe.cache_dir)
    jobs = {each.spec.key: each for each in _text_jobs(job)}
    # Only the recipe's own prompts are in the cache. Other prompts are encoded in the dtypes of the cache, so
    # that their pictures do not change when the recipe adopts them.
    missing = {key: each for key, each in jobs.items() if not store.check(each.spec).valid}
    texts: dict[str, Mapping[str, Tensor]] = {
        key: read_entry(store, each.spec, each.name) for key, each in jobs.items() if key not in missing
    }
    if missing:
        progress = Progress(report, scratch, jobs=missing, what="prompts encoded", rank=0)
        texts |= _encoded_texts(job, list(missing.values()), device, progress)
        free_memory()
    return texts


def _text_jobs(job: DrawingJob) -> Iterator[Job]:
    # A job without facts, because what it encodes is never written to the cache.
    yield Job(job.empty_text, {}, {"caption": ""}, "the empty caption", 1)
    entries = RecipeEntries(job.recipe)
    for prompt in job.prompts:
        _, files = file_images(entries, prompt.references)
        images = {} if files is None else {"images": json.loads(files)}
        for each in prompt.entries():
            name = f"the prompt {each.caption[:60]!r}"
            seen = images if each.text == prompt.text or entries.sees_images_in_negative else {}
            yield Job(each.text, {}, {"caption": each.caption, **seen}, name, 1)


def _encoded_texts(
    job: DrawingJob, missing: list[Job], device: str, progress: Progress
) -> dict[str, Mapping[str, Tensor]]:
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


def _text_chunks(job: DrawingJob, cell: Cell) -> PngInfo:
    chunks = PngInfo()
    prompt = job.prompts[cell.number]
    facts = {
        PROMPT_KEY: prompt.caption,
        "lora": str(cell.lora.file.name) if job.run is None else f"run {job.run}, {cell.lora.label}",
        "strength": number_text(cell.strength),
        "seed": str(job.seed),
        "steps": str(prompt.steps),
        "recipe": job.recipe.name,
        **prompt.settings(),
    }
    for key, text in facts.items():
        # International text, because prompts may be in any script and the plain chunks hold Latin-1 only.
        chunks.add_itxt(key, text)
    return chunks


def drawing_memory_error(job: DrawingJob, usage: str) -> DrawingError:
    """Return the error for memory that ran out; `usage` is what `out_of_memory_as` measured."""
    training, precision = job.recipe.training, job.recipe.accelerate.mixed_precision
    fix = "close other programs that use the device, such as a training"

    # A run's LoRA is drawn with the quantization that it was trained with.
    if training.weight_format == "none" and job.run is None:
        fix += ", or set training.quantize: int8 or nf4"
    return DrawingError(
        "memory ran out while pictures were drawn" + (f" ({usage})" if usage else ""),
        where=f"accelerate.mixed_precision {precision}, training.quantize {training.quantize}, "
        f"training.compute {training.compute}",
        fix=fix,
    )
