"""Micro-batches from the store, read ahead in threads.

All that is not the model's own work happens here, off the training thread: reading entries, checking their
shapes against the tables, drawing noise and timesteps, stacking. The trainer holds neither a VAE nor a text
encoder, unless the recipe asks for text encoders to be trained: then captions are handed on as they are.

B is the number of slots of one share, C, h, w are the latent's, T and D the text embedding's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pipeline.cache.entry_format import LATENT, MEAN, STD
from pipeline.cache.remote_store import store_at
from pipeline.cache.store import EntrySpec, Store, TensorSpec
from pipeline.cache.worker.tensors import read_torch
from pipeline.errors import StoreError
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.plan.seeding import stream
from pipeline.trained_lora.plan.steps import Slot, StepPlan, TrainingPlan
from pipeline.trained_lora.worker.noise import Noise, noise_levels

if TYPE_CHECKING:
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.trained_lora.samples import TrainingInput

AHEAD = 4
"""Micro-batches that are ready or in the making at most, so that memory does not grow with the plan; or as
many as there are readers, where these are more."""

T = TypeVar("T")


@dataclass(frozen=True)
class MicroInput:
    """One rank's tensors for one forward and backward pass.

    Attributes:
        sample_ids: Of the B slots.
        latent: Float32 (B, C, h, w).
        noise: Like it, from the standard normal distribution, and what the recipe adds to it.
        input_noise: Like it: what is mixed into the latent, `noise` and any perturbation.
        timesteps: (B,), as `Family.timesteps` gives them.
        conditions: By the names of `families.Conditions`: text tensors float32 (B, ...), sizes int64 (B, 2).
            Where text encoders are trained there are no text tensors.
        weights: Float32 (B,): 1, or 0 for a stand-in.
        indices: Int64 (B,): the slots' places in the step's global batch.
        captions: Of the B slots, "" where one was dropped; none unless text encoders are trained.
    """

    sample_ids: tuple[str, ...]
    latent: Tensor
    noise: Tensor
    input_noise: Tensor
    timesteps: Tensor
    conditions: dict[str, Tensor]
    weights: Tensor
    indices: Tensor
    captions: tuple[str, ...] = ()

    def to(self, device: torch.device) -> MicroInput:
        """The same on `device`; copies from pinned memory do not block."""
        move = _mover(device)
        return MicroInput(
            sample_ids=self.sample_ids,
            latent=move(self.latent),
            noise=move(self.noise),
            input_noise=move(self.input_noise),
            timesteps=move(self.timesteps),
            conditions={name: move(tensor) for name, tensor in self.conditions.items()},
            weights=move(self.weights),
            indices=move(self.indices),
            captions=self.captions,
        )

    def pinned(self) -> MicroInput:
        """The same in page-locked memory, from which a GPU copies by itself."""
        return MicroInput(
            sample_ids=self.sample_ids,
            latent=self.latent.pin_memory(),
            noise=self.noise.pin_memory(),
            input_noise=self.input_noise.pin_memory(),
            timesteps=self.timesteps.pin_memory(),
            conditions={name: tensor.pin_memory() for name, tensor in self.conditions.items()},
            weights=self.weights.pin_memory(),
            indices=self.indices.pin_memory(),
            captions=self.captions,
        )


class MicroBatchMaker:
    """Turns shares of a plan into tensors; safe to use from several threads."""

    def __init__(self, order: TrainingJob, family: WorkerFamily, scheduler: Any) -> None:
        """Keep what all shares need; nothing is read yet.

        Args:
            order: The samples and the seed.
            family: Gives noise levels their timesteps.
            scheduler: From `make_noise_scheduler`.
        """
        self._store = store_at(order.recipe.cache_dir)
        self._inputs = order.inputs
        self._empty_text = order.empty_text
        self._seed = order.recipe.training.seed
        self._timesteps = order.recipe.training.timesteps
        self._noise = Noise(order.recipe.training)
        self._reads_text = order.recipe.training.lora.text_encoders is None
        self._family = family
        self._scheduler = scheduler

    @property
    def readers(self) -> int:
        """Threads that keep up with training."""
        return self._store.readers

    def make(self, step: int, share: tuple[Slot, ...]) -> MicroInput:
        """The tensors of one rank's share of one micro-batch.

        A slot's noise and timestep depend on (seed, step, slot index) alone, a draw of the VAE's posterior
        on (seed, sample, epoch).

        Raises:
            StoreError: An entry is missing or damaged, or has another shape than the table says; names sample
                and file.
        """
        items = [self._inputs.named(slot.variant_id) for slot in share]
        latent = torch.stack([self._latent(slot, item) for slot, item in zip(share, items, strict=True)])
        shape = _image_shape(latent)
        drawn = [self._noise.draw(step, slot.index, shape) for slot in share]
        uniform = [stream(self._seed, "timestep", step, slot.index).random() for slot in share]
        levels = noise_levels(
            torch.tensor(uniform, dtype=torch.float64), self._timesteps, self._family.density
        )
        return MicroInput(
            sample_ids=tuple(slot.variant_id for slot in share),
            latent=latent,
            noise=torch.from_numpy(np.stack([each.target for each in drawn])),
            input_noise=torch.from_numpy(np.stack([each.input for each in drawn])),
            timesteps=self._family.noise.timesteps(self._scheduler, levels, shape),
            conditions=self._conditions(share, items),
            weights=torch.tensor([slot.weight for slot in share], dtype=torch.float32),
            indices=torch.tensor([slot.index for slot in share]),
            captions=self._captions(share, items),
        )

    def make_fixed(self, share: tuple[Slot, ...], levels: Sequence[float]) -> MicroInput:
        """Tensors that are the same in every run of every recipe that has these samples.

        Plain normal noise by sample and noise level, the mean where an entry holds moments.

        Args:
            share: The samples; no caption is dropped.
            levels: The noise level of each, in [0, 1), as `Family.timesteps` takes them.

        Raises:
            StoreError: As `make`.
        """
        items = [self._inputs.named(slot.variant_id) for slot in share]
        latent = torch.stack(
            [self._latent(slot, item, mean=True) for slot, item in zip(share, items, strict=True)]
        )
        shape = _image_shape(latent)
        noise = torch.from_numpy(
            np.stack(
                [
                    stream("fixed noise", slot.variant_id, str(level)).standard_normal(
                        shape, dtype=np.float32
                    )
                    for slot, level in zip(share, levels, strict=True)
                ]
            )
        )
        at = torch.tensor(levels, dtype=torch.float64)
        return MicroInput(
            sample_ids=tuple(slot.variant_id for slot in share),
            latent=latent,
            noise=noise,
            input_noise=noise,
            timesteps=self._family.noise.timesteps(self._scheduler, at, shape),
            conditions=self._conditions(share, items),
            weights=torch.ones(len(share)),
            indices=torch.tensor([slot.index for slot in share]),
            captions=self._captions(share, items),
        )

    def _latent(self, slot: Slot, item: TrainingInput, *, mean: bool = False) -> Tensor:
        """The slot's view (C, h, w); of an entry that holds moments, this epoch's draw or the mean."""
        tensors = self._read(item.views[slot.view].entry, slot.variant_id)
        if LATENT in tensors:
            return tensors[LATENT]
        if mean:
            return tensors[MEAN]
        random = stream(self._seed, "moments", slot.variant_id, slot.epoch, slot.occurrence)
        normal = random.standard_normal(tuple(tensors[MEAN].shape), dtype=np.float32)
        return tensors[MEAN] + tensors[STD] * torch.from_numpy(normal)

    def _conditions(self, share: tuple[Slot, ...], items: list[TrainingInput]) -> dict[str, Tensor]:
        conditions = self._text(share, items) if self._reads_text else {}
        conditions["original_size_hw"] = torch.tensor([item.original_size_hw for item in items])
        conditions["crop_top_left"] = torch.tensor(
            [item.views[slot.view].crop_top_left for slot, item in zip(share, items, strict=True)]
        )
        conditions["target_size_hw"] = torch.tensor([item.target_size_hw for item in items])
        return conditions

    def _text(self, share: tuple[Slot, ...], items: list[TrainingInput]) -> dict[str, Tensor]:
        """What the cache has of the slots' captions, as `Family.text.stack` puts it together."""
        texts = [
            self._read(
                self._empty_text if slot.drop_caption else item.variants[slot.variant].entry, item.variant_id
            )
            for slot, item in zip(share, items, strict=True)
        ]
        return self._family.text.stack(texts)

    def _captions(self, share: tuple[Slot, ...], items: list[TrainingInput]) -> tuple[str, ...]:
        if self._reads_text:
            return ()
        return tuple(
            "" if slot.drop_caption else item.variants[slot.variant].caption
            for slot, item in zip(share, items, strict=True)
        )

    def _read(self, spec: EntrySpec, sample_id: str) -> dict[str, Tensor]:
        return read_entry(self._store, spec, f"sample {sample_id}")


def _image_shape(latent: Tensor) -> tuple[int, int, int]:
    _, channels, height, width = latent.shape
    return channels, height, width


def read_entry(store: Store, spec: EntrySpec, whose: str) -> dict[str, Tensor]:
    """The entry's tensors in float32, each of the shape that the tables say.

    Raises:
        StoreError: The entry is missing or damaged, or a tensor has another shape; names `whose` and file.
    """
    try:
        stored = read_torch(store, spec)
    except StoreError as err:
        raise StoreError(err.what, where=f"{err.where}\nof {whose}", fix=err.fix) from err
    tensors: dict[str, Tensor] = {}
    for name, tensor in spec.tensors.items():
        tensors[name] = stored[name].float()
        if not tensor.admits(TensorSpec(tensor.dtype, tuple(tensors[name].shape))):
            what = f"{name} has shape {tuple(tensors[name].shape)}, the table says {tensor.shape}"
            fix = "run the recipe's cache job again"
            raise StoreError(what, where=f"{spec.kind}/{spec.key}\nof {whose}", fix=fix)
    return tensors


def micro_inputs(
    plan: TrainingPlan, maker: MicroBatchMaker, *, rank: int, start: int, pin: bool
) -> Generator[tuple[StepPlan, MicroInput]]:
    """Each micro-batch of `rank` from step `start` on, in the plan's order, with the step it belongs to.

    Close the generator to end its threads. An error of a thread is raised where its micro-batch would have
    come.
    """

    def make(step: int, share: tuple[Slot, ...]) -> MicroInput:
        made = maker.make(step, share)
        return made.pinned() if pin else made

    def jobs() -> Iterator[tuple[StepPlan, Callable[[], MicroInput]]]:
        for step, batch in plan.iterate(start):
            for micro in batch.micro_batches:
                share = micro[rank]
                yield batch, lambda step=step, share=share: make(step, share)

    yield from read_ahead(jobs(), readers=maker.readers)


def read_ahead(
    jobs: Iterable[tuple[StepPlan, Callable[[], T]]], *, readers: int = Store.readers
) -> Generator[tuple[StepPlan, T]]:
    """Each job's result, in order, made by as many threads, with `AHEAD` of them unfetched at most."""
    ahead = max(AHEAD, readers)
    waiting: deque[tuple[StepPlan, Future[T]]] = deque()
    with ThreadPoolExecutor(readers, thread_name_prefix="latentline-loader") as pool:
        try:
            for batch, job in jobs:
                waiting.append((batch, pool.submit(job)))
                if len(waiting) >= ahead:
                    ready, future = waiting.popleft()
                    yield ready, future.result()
            while waiting:
                ready, future = waiting.popleft()
                yield ready, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _mover(device: torch.device) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(device, non_blocking=True)
