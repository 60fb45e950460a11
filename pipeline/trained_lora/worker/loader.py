"""Micro-batches: reading cache entries, sampling noise and stacking tensors, ahead of training in threads.

B is the number of slots in one rank's share of a micro-batch; C, h and w are the latent's dimensions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pipeline.cache.entry_format import LATENT, MASK, MEAN, STD
from pipeline.cache.store import EntrySpec, Store, TensorSpec
from pipeline.cache.worker.tensors import read_torch
from pipeline.errors import StoreError
from pipeline.side_inputs import SIDE_INPUTS
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.plan.random_streams import stream
from pipeline.trained_lora.plan.steps import Slot, StepPlan, TrainingPlan
from pipeline.trained_lora.worker.loss import mask_loss_weights, mask_prior_weights
from pipeline.trained_lora.worker.micro_input import MicroInput
from pipeline.trained_lora.worker.noise import NoiseSampler, Place, noise_levels

if TYPE_CHECKING:
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import Recipe
    from pipeline.trained_lora.inputs import TrainingInput

PREFETCH = 4
"""Number of micro-batches prepared ahead of training; the number of reader threads if that is larger."""

T = TypeVar("T")


class MicroBatchMaker:
    """Reads cache entries and draws noise and timesteps for the samples of a training step.

    It can be used from several threads.
    """

    def __init__(self, job: TrainingJob, family: WorkerFamily, noise_scheduler: Any) -> None:
        training = job.recipe.training
        self._store = job.store
        self._inputs = job.inputs
        self._empty_text = job.empty_text
        self._seed = training.seed
        self._timestep_settings = training.timesteps
        self._guidance = training.guidance
        self._noise = NoiseSampler(training)
        self._loss_weights = loss_weights(job.recipe)
        self._keeps_prediction = {
            dataset.name
            for dataset in job.recipe.datasets
            if dataset.role == "prior" and training.loss.prior == "prediction"
        }
        self._masks = {dataset.name: dataset.mask for dataset in job.recipe.datasets}

        # Trained text encoders encode captions in every step, so captions are passed on as text.
        self._reads_text = training.lora.text_encoders is None
        self._family = family
        self._noise_scheduler = noise_scheduler

    @property
    def readers(self) -> int:
        """Number of threads that read from the store efficiently."""
        return self._store.readers

    def make(self, step: int, share: tuple[Slot, ...]) -> MicroInput:
        """Return the tensors of one rank's share of one micro-batch.

        A slot's noise and timestep depend only on (seed, step, slot index), or for a slider's pair on (seed,
        pair, epoch, occurrence). A sample of the VAE's posterior depends only on (seed, identity, epoch,
        occurrence).

        Raises:
            StoreError: A cache entry is missing or damaged, or its shape differs from the table; the error
                names the variant and the file.
        """
        inputs = [self._inputs.named(slot.variant_id) for slot in share]
        latent = torch.stack([self._latent(slot, item) for slot, item in zip(share, inputs, strict=True)])
        shape = _latent_shape(latent)

        # Both images of a slider's pair get the same noise, so that their difference is only the attribute.
        places: list[Place] = [
            (step, slot.index) if item.pair is None else (item.pair, slot.epoch, slot.occurrence)
            for slot, item in zip(share, inputs, strict=True)
        ]
        noise = [self._noise.sample(place, shape) for place in places]

        # Each place has a stream of its own, so that the split over ranks and micro-batches changes nothing.
        uniform = [stream(self._seed, "timestep", *place).random() for place in places]
        levels = noise_levels(
            torch.tensor(uniform, dtype=torch.float64),
            self._timestep_settings,
            self._family.spec.noise.density,
        )
        return self._micro_input(
            share,
            inputs,
            latent=latent,
            noise=torch.from_numpy(np.stack([each.target for each in noise])),
            input_noise=torch.from_numpy(np.stack([each.input for each in noise])),
            levels=levels,
        )

    def make_fixed(
        self, share: tuple[Slot, ...], levels: Sequence[float], *, noise_of: Sequence[str] | None = None
    ) -> MicroInput:
        """Return tensors of the slots that do not depend on the run, as validation needs them.

        The noise depends only on the noise level in [0, 1) and an identity: the input's own, or the one in
        `noise_of`. The latent is the mean if the entry holds a posterior, and no caption is dropped. All runs
        and recipes with these inputs get the same tensors.

        Raises:
            StoreError: See `make`.
        """
        inputs = [self._inputs.named(slot.variant_id) for slot in share]
        latent = torch.stack(
            [self._latent(slot, item, use_mean=True) for slot, item in zip(share, inputs, strict=True)]
        )
        shape = _latent_shape(latent)
        identities = [item.identity for item in inputs] if noise_of is None else noise_of

        noise_by_slot = [
            # Without the recipe's seed, so that runs with different seeds are measured with the same noise.
            stream("fixed noise", identity, str(level)).standard_normal(shape, dtype=np.float32)
            for identity, level in zip(identities, levels, strict=True)
        ]
        noise = torch.from_numpy(np.stack(noise_by_slot))
        level_tensor = torch.tensor(levels, dtype=torch.float64)
        return self._micro_input(
            share, inputs, latent=latent, noise=noise, input_noise=noise, levels=level_tensor
        )

    def _micro_input(
        self,
        share: tuple[Slot, ...],
        inputs: list[TrainingInput],
        *,
        latent: Tensor,
        noise: Tensor,
        input_noise: Tensor,
        levels: Tensor,
    ) -> MicroInput:
        assert len({item.lora_scale for item in inputs}) == 1, "a micro-batch has one scale of the LoRA"
        pairs = list(zip(share, inputs, strict=True))
        conditions = self._text(share, inputs) if self._reads_text else {}
        conditions["original_size_hw"] = torch.tensor([item.original_size_hw for item in inputs])
        crops = [item.views[slot.view].crop_top_left for slot, item in pairs]
        conditions["crop_top_left"] = torch.tensor(crops)
        conditions["target_size_hw"] = torch.tensor([item.target_size_hw for item in inputs])
        if self._family.takes_guidance:
            conditions["guidance"] = self._guidance
        for side_input in SIDE_INPUTS:
            if side_input.condition is not None and (images := self._images(pairs, side_input.plural)):
                conditions[side_input.condition] = images

        place_weights, prior_place_weights = self._place_weights(pairs, latent)
        captions = ("" if slot.drop_caption else item.variants[slot.variant].caption for slot, item in pairs)
        return MicroInput(
            variant_ids=tuple(slot.variant_id for slot in share),
            latent=latent,
            noise=noise,
            input_noise=input_noise,
            timesteps=self._family.noise.timesteps(self._noise_scheduler, levels, _latent_shape(latent)),
            conditions=conditions,
            weights=torch.tensor([slot.weight for slot in share], dtype=torch.float32),
            loss_weights=torch.tensor([self._loss_weights[item.dataset] for item in inputs]),
            indices=torch.tensor([slot.index for slot in share]),
            captions=() if self._reads_text else tuple(captions),
            is_prior=self._is_prior(inputs),
            place_weights=place_weights,
            prior_place_weights=prior_place_weights,
            lora_scale=inputs[0].lora_scale,
        )

    def _latent(self, slot: Slot, item: TrainingInput, *, use_mean: bool = False) -> Tensor:
        """Return the slot's latent (C, h, w)."""
        tensors = self._read(item.views[slot.view].entry, slot.variant_id)

        # An entry holds either one latent, or the posterior's mean and standard deviation.
        if LATENT in tensors:
            return tensors[LATENT]
        mean, std = tensors[MEAN].float(), tensors[STD].float()
        if use_mean:
            return mean

        # Epoch and repeat are part of the seed, so that every showing has another sample of the posterior.
        random = stream(self._seed, "moments", item.identity, slot.epoch, slot.occurrence)
        normal = random.standard_normal(tuple(mean.shape), dtype=np.float32)
        return mean + std * torch.from_numpy(normal)

    def _images(self, pairs: list[tuple[Slot, TrainingInput]], name: str) -> tuple[Tensor, ...]:
        """Return the latents (B, C, h, w) of each file of a side input, in order; empty without files."""
        specs = [item.views[slot.view].side_inputs.get(name, ()) for slot, item in pairs]
        return tuple(
            torch.stack(
                [
                    self._read(spec, slot.variant_id)[LATENT]
                    for (slot, _), spec in zip(pairs, each, strict=True)
                ]
            )
            for each in zip(*specs, strict=True)
        )

    def _is_prior(self, inputs: list[TrainingInput]) -> Tensor | None:
        is_prior = [item.dataset in self._keeps_prediction for item in inputs]
        return torch.tensor(is_prior) if any(is_prior) else None

    def _place_weights(
        self, pairs: list[tuple[Slot, TrainingInput]], latent: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return `place_weights` and `prior_place_weights` of `MicroInput`."""
        masks = [item.views[slot.view].mask for slot, item in pairs]
        if not any(masks):
            return None, None
        shape = (len(pairs), 1, *latent.shape[2:])

        # The values of slots without a mask in a micro-batch where another slot has one.
        weights, prior_weights = torch.ones(shape), torch.zeros(shape)
        for number, ((slot, item), spec) in enumerate(zip(pairs, masks, strict=True)):
            settings = self._masks[item.dataset]
            if spec is not None and settings is not None:
                mask = self._read(spec, slot.variant_id)[MASK].float()
                weights[number] = mask_loss_weights(mask, settings)
                prior_weights[number] = mask_prior_weights(mask, settings)
        return weights, prior_weights if bool(prior_weights.any()) else None

    def _text(self, share: tuple[Slot, ...], inputs: list[TrainingInput]) -> dict[str, Any]:
        """Return the cached text embeddings of the slots' captions, batched by `Family.text.stack`."""
        texts = [
            self._read(
                # If the text encoder sees the references, each image has an empty caption of its own.
                item.empty_text or self._empty_text
                if slot.drop_caption
                else item.variants[slot.variant].entry,
                item.variant_id,
            )
            for slot, item in zip(share, inputs, strict=True)
        ]
        return self._family.text.stack(texts)

    def _read(self, spec: EntrySpec, variant_id: str) -> dict[str, Tensor]:
        return read_stored(self._store, spec, f"sample {variant_id}")


def loss_weights(recipe: Recipe) -> dict[str, float]:
    """Return the factor of the loss of each dataset's images."""
    prior_weight = recipe.training.loss.prior_weight
    return {
        dataset.name: dataset.loss_weight * (prior_weight if dataset.role == "prior" else 1.0)
        for dataset in recipe.datasets
    }


def _latent_shape(latent: Tensor) -> tuple[int, int, int]:
    _, channels, height, width = latent.shape
    return channels, height, width


def read_entry(store: Store, spec: EntrySpec, owner: str) -> dict[str, Tensor]:
    """Return the tensors of `read_stored` as float32."""
    return {name: tensor.float() for name, tensor in read_stored(store, spec, owner).items()}


def read_stored(store: Store, spec: EntrySpec, owner: str) -> dict[str, Tensor]:
    """Read an entry's tensors and check their shapes against the table.

    Raises:
        StoreError: The entry is missing or damaged, or a tensor has another shape; the error names `owner`,
            the sample or prompt that needs the entry, and the file.
    """
    try:
        stored = read_torch(store, spec)
    except StoreError as err:
        raise StoreError(err.what, where=f"{err.where}\nof {owner}", fix=err.fix) from err

    tensors: dict[str, Tensor] = {}
    for name, expected in spec.tensors.items():
        tensors[name] = stored[name]
        shape = tuple(tensors[name].shape)
        if not expected.admits(TensorSpec(expected.dtype, shape)):
            raise StoreError(
                f"{name} must have the shape {expected.shape} that the table records, got {shape}",
                where=f"{spec.kind}/{spec.key}\nof {owner}",
                fix="run the recipe's cache job again, which brings the table and the entry up to date",
            )
    return tensors


def micro_inputs(
    plan: TrainingPlan, maker: MicroBatchMaker, *, rank: int, start: int, pin: bool
) -> Generator[tuple[StepPlan, MicroInput]]:
    """Yield each micro-batch of `rank` with its step, in the plan's order, beginning at step `start`.

    Close the generator to end its threads. A thread's error is raised at its micro-batch. With `pin`, the
    tensors are in pinned memory.
    """

    def make(step: int, share: tuple[Slot, ...]) -> MicroInput:
        micro = maker.make(step, share)

        # In the reader's thread: pinning copies every tensor, and training must not wait for that.
        return micro.pinned() if pin else micro

    def tasks() -> Iterator[tuple[StepPlan, Callable[[], MicroInput]]]:
        for step, batch in plan.iterate(start):
            for micro in batch.micro_batches:
                share = micro[rank]

                # Defaults bind this iteration's values; the lambda runs later, in another thread.
                yield batch, lambda step=step, share=share: make(step, share)

    yield from prefetch(tasks(), readers=maker.readers)


def prefetch(
    tasks: Iterable[tuple[StepPlan, Callable[[], T]]], *, readers: int = 1
) -> Generator[tuple[StepPlan, T]]:
    """Run the tasks in `readers` threads and yield their results in order."""
    # The number of pending tasks is limited, so that memory does not grow with the plan (FAILURES L12). Fewer
    # pending tasks than readers would leave threads without work.
    max_pending = max(PREFETCH, readers)
    pending: deque[tuple[StepPlan, Future[T]]] = deque()
    with ThreadPoolExecutor(readers, thread_name_prefix="latentline-loader") as pool:
        try:
            for batch, task in tasks:
                pending.append((batch, pool.submit(task)))
                if len(pending) >= max_pending:
                    next_batch, future = pending.popleft()
                    yield next_batch, future.result()
            while pending:
                next_batch, future = pending.popleft()
                yield next_batch, future.result()
        finally:
            # After an error or an early end, reads that have not begun would only delay the exit.
            for _, future in pending:
                future.cancel()
