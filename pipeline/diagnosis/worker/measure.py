"""The base model's loss on images under several captions, with the same noise.

D is the number of draws, each a noise level with its noise, and C the number of captions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import Tensor

from pipeline.cache.entry_format import LOSSES, TEXT
from pipeline.diagnosis.caption_swap import measure, positions
from pipeline.diagnosis.entries import EMPTY_TEXT, RECIPE, WORK_COLUMNS, num_others
from pipeline.encoding.jobs import Encoded, Encoding, Job, Outcome
from pipeline.encoding.progress import Progress
from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.processes.worker.devices import out_of_memory_as
from pipeline.recipe import LossSettings, Recipe, TimestepSettings
from pipeline.recipe.diagnosis import NUM_OTHERS
from pipeline.trained_lora.inputs import TrainingInputs
from pipeline.trained_lora.job import TrainingJob, recipe_from_json
from pipeline.trained_lora.plan.steps import Slot
from pipeline.trained_lora.prompts import entry_from_json
from pipeline.trained_lora.worker.base_model import enable_memory_savings_and_compile
from pipeline.trained_lora.worker.context_lora import load_base_with_context
from pipeline.trained_lora.worker.distributed import make_accelerator
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.loss import sample_losses
from pipeline.trained_lora.worker.memory.resident_blocks import least_free_bytes, resident_blocks
from pipeline.trained_lora.worker.micro_input import MicroInput
from pipeline.trained_lora.worker.noise import noise_levels

if TYPE_CHECKING:
    from pipeline.cache.store import Store

_EMBEDDINGS = (TEXT, "pooled_text_embedding")
"""Conditions of which the loss has a gradient."""

_GRADIENT_SCALE = 1024.0
"""Factor of the loss, whose gradient would be rounded to zero in float16."""

_LEVEL_DIGITS = 4
"""Digits of a noise level, which names its noise: rounding on different machines must not change it."""


class BaseLosses:
    """The base model of a recipe, without any adapter but its context LoRA."""

    def __init__(self, recipe: Recipe, base: Path, component_folders: Mapping[str, Path]) -> None:
        """Load the base model.

        Raises:
            ModelError: The base model cannot be loaded.
            TrainingError: The quantization needs a missing package or GPU.
        """
        self._family = load_family(base, component_folders)
        precision = self._family.mixed_precision(recipe.accelerate.mixed_precision)
        self._accelerator = make_accelerator(
            recipe.accelerate, mixed_precision=precision, find_unused_parameters=False
        )
        resident = resident_blocks(self._family, recipe, least_free_bytes(self._accelerator.device))
        device = str(self._accelerator.device)
        denoiser = load_base_with_context(self._family, resident.applied(recipe), device)
        if num_others(recipe) < NUM_OTHERS:
            # A gradient needs memory like a training step. Compilation would change the losses.
            training = resident.applied(recipe).training.model_copy(update={"compile": False})
            saving = recipe.model_copy(update={"training": training})
            enable_memory_savings_and_compile(self._family, denoiser, saving)
        # Mixed precision then returns float32, as in training.
        self._denoiser = self._accelerator.prepare_model(denoiser, evaluation_mode=True)

        # The base model's own schedule and density: the recipe's changes are for its training.
        self._scheduler: Any = self._family.noise.load_scheduler()
        uniform = torch.tensor(positions(), dtype=torch.float64)
        levels = noise_levels(uniform, TimestepSettings(), self._family.spec.noise.density)
        self._levels = [round(level, _LEVEL_DIGITS) for level in levels.tolist()]
        # Training with batches of this size fits into memory, and needs more of it.
        self._batch_size = recipe.training.batch_size

    def batches(self, job: TrainingJob) -> MicroBatchMaker:
        """Return what reads the inputs of a job for `losses`."""
        return MicroBatchMaker(job, self._family, self._scheduler)

    def losses(
        self, maker: MicroBatchMaker, variant_id: str, draws: Sequence[int], captions: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        """Return the mean squared errors (D, C) of an input in some draws under some of its captions.

        In one draw, all captions have the same noise.
        """
        # Without other images, so that the result depends on none.
        cells = [(_slot(variant_id, caption), draw) for draw in draws for caption in captions]
        parts = (cells[start : start + self._batch_size] for start in range(0, len(cells), self._batch_size))
        errors = [
            self._errors(
                maker.make_fixed(tuple(slot for slot, _ in part), [self._levels[draw] for _, draw in part])
            )
            for part in parts
        ]
        return np.concatenate(errors).reshape(len(draws), len(captions))

    def changes(self, maker: MicroBatchMaker, variant_id: str, num_captions: int) -> npt.NDArray[np.float32]:
        """Return the change of an input's loss in the first draw under each caption, (C,), to first order.

        It is the product of the loss's gradient at the embedding of the first caption with the difference
        between the embeddings.
        """
        slots = tuple(_slot(variant_id, caption) for caption in range(num_captions))
        texts = maker.make_fixed(slots, self._levels[:1] * num_captions).to(self._accelerator.device)
        embeddings = [texts.conditions[name] for name in _EMBEDDINGS if name in texts.conditions]

        # The tensors of the first caption alone, but with the padding of the longest one.
        own = [each[:1].clone().requires_grad_() for each in embeddings]
        conditions = {name: _first(each) for name, each in texts.conditions.items()}
        conditions |= dict(zip((name for name in _EMBEDDINGS if name in conditions), own, strict=True))
        micro = maker.make_fixed(slots[:1], self._levels[:1])
        loss = self._losses(replace(micro, conditions=conditions)).sum() * _GRADIENT_SCALE
        gradients = torch.autograd.grad(loss, own, materialize_grads=True)
        changes = [
            ((each - each[:1]) * gradient).flatten(1).sum(1)
            for each, gradient in zip(embeddings, gradients, strict=True)
        ]
        return (torch.stack(changes).sum(0) / _GRADIENT_SCALE).cpu().numpy()

    def _errors(self, micro: MicroInput) -> npt.NDArray[np.float32]:
        with torch.no_grad():
            return self._losses(micro).cpu().numpy()

    def _losses(self, micro: MicroInput) -> Tensor:
        noise = self._family.noise
        # One autocast context per batch: autocast caches the cast weights for as long as it is active.
        with self._accelerator.autocast():
            micro = micro.to(self._accelerator.device)
            noisy = noise.add_noise(self._scheduler, micro.latent, micro.input_noise, micro.timesteps)
            target = noise.target(self._scheduler, micro.latent, micro.noise, micro.timesteps)
            prediction = self._family.denoiser.predict(
                self._denoiser, noisy, micro.timesteps, micro.conditions
            )
            # A mask applies, because a caption need not describe what is not trained on.
            return sample_losses(prediction, target, LossSettings(), micro.place_weights)


def _first(value: Any) -> Any:
    """Return a condition of the first slot; see `denoiser.Conditions`."""
    if isinstance(value, tuple):
        each = cast("tuple[Any, ...]", value)
        return tuple(image[:1] for image in each) if isinstance(each[0], Tensor) else each[:1]
    return value[:1] if isinstance(value, Tensor) else value


def _slot(variant_id: str, caption: int) -> Slot:
    return Slot(variant_id, 0, epoch=0, occurrence=0, drop_caption=False, variant=caption)


class SwapEncoder:
    """Measures the captions of an encoding."""

    def __init__(self, encoding: Encoding, progress: Progress) -> None:
        self._progress = progress
        recipe = recipe_from_json(encoding.settings[RECIPE])
        # Captions are read from the cache, also where training would encode them with trained encoders.
        lora = recipe.training.lora.model_copy(update={"text_encoders": None})
        training = recipe.training.model_copy(update={"lora": lora})
        self._job = TrainingJob(
            recipe=recipe.model_copy(update={"training": training}),
            base=encoding.model_folder,
            component_folders=encoding.component_folders,
            run="",
            inputs=TrainingInputs(pl.DataFrame(schema=WORK_COLUMNS)),
            empty_text=entry_from_json(encoding.settings[EMPTY_TEXT]),
            prompts=(),
        )
        with out_of_memory_as(_memory_error):
            self._base = BaseLosses(self._job.recipe, self._job.base, self._job.component_folders)

    def encoded(self, jobs: Iterable[Job], store: Store) -> Iterator[tuple[Job, Outcome]]:
        """Yield each job with its losses.

        Raises:
            StoreError: A latent or a text embedding cannot be read.
            TrainingError: Memory ran out.
        """
        own = list(jobs)
        if not own:
            return
        rows = [dict(job.work) for job in own]
        inputs = TrainingInputs(pl.DataFrame(rows, schema={name: WORK_COLUMNS[name] for name in rows[0]}))
        maker = self._base.batches(replace(self._job, inputs=inputs))
        for job in own:
            self._progress.working_on(job.name)
            # Another process may have measured the caption since the stage checked.
            if store.check(job.spec).valid:
                yield job, "present"
                continue

            name = job.work["variant_id"]
            with out_of_memory_as(_memory_error):
                num_captions = len(job.work["captions"])
                losses = measure(
                    partial(self._base.losses, maker, name),
                    partial(self._base.changes, maker, name, num_captions),
                    num_captions,
                    num_others(self._job.recipe),
                )
            yield job, Encoded({LOSSES: losses}, {})


def _memory_error(usage: str) -> TrainingError:
    return TrainingError(
        "memory ran out while captions were measured" + (f" ({usage})" if usage else ""),
        where="diagnosis.captions",
        fix="close other programs that use the device, lower training.batch_size, or set "
        "training.quantize: int8 or nf4",
    )
