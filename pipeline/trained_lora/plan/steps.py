"""The optimizer steps of a run, as a sequence of exact length.

A plan is a pure function of the inputs, the seed and the sizes of a step. Every process computes it, and a
run resumes by index.

Terms, from the inside out:

    slot          one sample at an index of a step's global batch; seeds the noise
    share         the slots of one rank in one micro-step, at most `batch_size`
    micro-batch   the shares of all ranks: one forward and backward on each rank; one bucket, and one side
                  of a slider
    step          up to `gradient_accumulation` micro-batches, then the optimizer
    epoch         each sample `repeats` times, or a mix by weights (see `mixing`); steps never span two epochs
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from pipeline.errors import TrainingError, counted, verb
from pipeline.trained_lora.plan.batching import Epoch, Epochs, Underfilled
from pipeline.trained_lora.plan.inputs import PlanInputs
from pipeline.trained_lora.plan.mixing import Draws, Exhausted, Mix
from pipeline.trained_lora.plan.random_streams import hash_bits


@dataclass(frozen=True)
class PlanSettings:
    """Everything but the samples that decides a plan; counts are at least 1.

    Attributes:
        batch_size: Samples per process in one micro-step.
        gradient_accumulation: Micro-steps in a full step.
        num_processes: World size.
        caption_dropout: Fraction of the slots that use the empty caption, in [0, 1].
        dataset_dropouts: `caption_dropout` of datasets that differ, by name.
        seed: Seed of shuffling, dropout, variants and views.
        weights: Sampling weight per dataset, or empty, as in `Mix`.
        left_out: Inputs with slots of weight 0, by variant_id.
    """

    steps: int
    batch_size: int
    gradient_accumulation: int
    num_processes: int
    caption_dropout: float
    seed: int
    underfilled: Underfilled = "partial"
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    exhausted: Exhausted = "leave"
    dataset_dropouts: Mapping[str, float] = field(default_factory=dict[str, float])
    left_out: frozenset[str] = frozenset()

    def dropout_of(self, dataset: str) -> float:
        """Return the fraction of a dataset's slots that use the empty caption."""
        return self.dataset_dropouts.get(dataset, self.caption_dropout)


@dataclass(frozen=True, slots=True)
class Slot:
    """One sample at an index of a step's global batch.

    Attributes:
        index: Index in the step's global batch, counted over micro-batches and ranks. It does not depend on
            how the batch is split over them.
        epoch: Number of the epoch, from 0.
        occurrence: Number of the sample's repeat in this epoch, from 0.
        drop_caption: Whether the empty caption replaces the sample's own.
        variant: Index of the caption, from 0.
        view: Index of the latent, from 0.
        weight: 1.0, or 0.0 for the placeholder of a rank without a sample in this micro-step, and for an
            input that is left out.
    """

    variant_id: str
    index: int
    epoch: int
    occurrence: int
    drop_caption: bool
    variant: int = 0
    view: int = 0
    weight: float = 1.0


MicroBatch = tuple[tuple[Slot, ...], ...]
"""One share per rank, in rank order. No share is empty, and all samples are from one bucket."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step.

    Attributes:
        step: Number of the step, from 0.
        epoch: Number of the epoch, from 0.
        micro_batches: Micro-batches, 1 to `gradient_accumulation`.
        num_samples: Number of slots without placeholders, by which the sum of the losses is divided.
    """

    step: int
    epoch: int
    micro_batches: tuple[MicroBatch, ...]
    num_samples: int

    def slots(self) -> list[Slot]:
        """Return the slots of weight 1, in the order of their indices."""
        return [slot for micro in self.micro_batches for share in micro for slot in share if slot.weight > 0]


class TrainingPlan(Sequence[StepPlan]):
    """All optimizer steps of a run. `plan[i]` shuffles at most one epoch, which is cached."""

    def __init__(self, inputs: PlanInputs, settings: PlanSettings) -> None:
        """Validate the inputs; epochs are shuffled on first use.

        Raises:
            TrainingError: There are no samples, a variant_id is duplicated, or a setting is out of range.
        """
        self.settings = settings
        self.inputs = inputs
        _require_usable(inputs, settings)
        self._capacity = settings.batch_size * settings.num_processes
        self._mix = Mix(inputs, settings.seed, settings.weights, settings.exhausted)
        self._epochs = Epochs(self._mix, settings.seed, self._capacity, settings.underfilled)
        self._bucket_sizes = self._mix.sizes(0)
        self.steps_per_epoch = self._steps_of(0)
        # Epochs of a mix that changes differ in length, so their first steps are listed.
        self._starts = [0, self.steps_per_epoch]
        while not self._mix.constant and self._starts[-1] < settings.steps:
            self._starts.append(self._starts[-1] + self._steps_of(len(self._starts) - 1))
        self._cached_epoch: tuple[int, Epoch] | None = None

    @staticmethod
    def steps_in(inputs: PlanInputs, settings: PlanSettings, epochs: int) -> int:
        """Return the number of optimizer steps in `epochs` epochs, whatever `settings.steps` is.

        Raises:
            TrainingError: As `TrainingPlan`.
        """
        plan = TrainingPlan(inputs, settings)
        if plan._mix.constant:
            return epochs * plan.steps_per_epoch
        return sum(plan._steps_of(epoch) for epoch in range(epochs))

    def __len__(self) -> int:
        return self.settings.steps

    @overload
    def __getitem__(self, index: int) -> StepPlan: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepPlan]: ...
    def __getitem__(self, index: int | slice) -> StepPlan | list[StepPlan]:
        """Return one step, or the steps of a slice."""
        if isinstance(index, slice):
            return [self._step(number) for number in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"step {index} of a plan of {len(self)} steps")
        return self._step(number)

    def iterate(self, start: int = 0) -> Iterator[tuple[int, StepPlan]]:
        """Yield (number, step) from `start` to the end of the plan."""
        for number in range(start, len(self)):
            yield number, self._step(number)

    def times_seen(self) -> npt.NDArray[np.int64]:
        """Return how often the complete plan trains on each of `samples`."""
        whole, rest = divmod(len(self), self.steps_per_epoch)
        # Complete epochs then show each input `repeats` times, so that only the rest has to be counted.
        even = self._mix.constant and (self.settings.underfilled == "partial" or self._remainder() == 0)
        seen = self.inputs.repeats.astype(np.int64) * (whole if even else 0)
        for number in range(len(self) - rest if even else 0, len(self)):
            for draws in self._drawn_in(number):
                np.add.at(seen, draws.places, 1)
        return seen

    def numbers(self) -> dict[str, int | float | str]:
        """Return numbers for log and report; all but `epochs` and `steps` describe the first epoch."""
        capacity = self._capacity
        micro_batches = sum(self._micro_batches(size) for size in self._bucket_sizes.values())
        remainder = self._remainder()
        policy = self.settings.underfilled
        everything = sum(self._bucket_sizes.values())
        draws = everything - remainder if policy == "drop" else everything
        return {
            "steps": len(self),
            "epochs": round(self._num_epochs(), 3),
            "steps_per_epoch": self.steps_per_epoch,
            "draws_per_epoch": draws,
            "micro_batches_per_epoch": micro_batches,
            "underfilled_micro_batches": sum(size % capacity > 0 for size in self._bucket_sizes.values()),
            "dropped_per_epoch": remainder if policy == "drop" else 0,
            "global_batch_size": capacity * self.settings.gradient_accumulation,
            "filled": 1.0 if policy == "repeat" else round(draws / (micro_batches * capacity), 3),
            "underfilled": policy,
        }

    def dropped(self, epoch: int) -> dict[str, int]:
        """Return the number of draws that the policy `drop` omits from an epoch, by variant_id."""
        if self.settings.underfilled != "drop":
            return {}
        places, times = np.unique(self._epochs.dropped(epoch), return_counts=True)
        return dict(zip(self.inputs.ids_at(places), times.tolist(), strict=True))

    @property
    def num_epochs(self) -> int:
        """Number of epochs that have begun when the plan ends."""
        return self._place(len(self) - 1)[0] + 1

    def _num_epochs(self) -> float:
        if self._mix.constant:
            return len(self) / self.steps_per_epoch
        epoch, place = self._place(len(self) - 1)
        return epoch + (place + 1) / (self._starts[epoch + 1] - self._starts[epoch])

    def _place(self, number: int) -> tuple[int, int]:
        if self._mix.constant:
            return divmod(number, self.steps_per_epoch)
        epoch = bisect_right(self._starts, number) - 1
        return epoch, number - self._starts[epoch]

    def _steps_of(self, epoch: int) -> int:
        sizes = self._mix.sizes(epoch)
        micro_batches = sum(self._micro_batches(size) for size in sizes.values())
        _require_batches(micro_batches, sizes, self._capacity)
        return -(-micro_batches // self.settings.gradient_accumulation)

    def _micro_batches(self, bucket_size: int) -> int:
        if self.settings.underfilled == "drop":
            return bucket_size // self._capacity
        return -(-bucket_size // self._capacity)

    def _remainder(self) -> int:
        return sum(size % self._capacity for size in self._bucket_sizes.values())

    def _drawn_in(self, number: int) -> list[Draws]:
        epoch, place = self._place(number)

        # Steps are read in order, so one cached epoch saves shuffling it for each of its steps.
        if self._cached_epoch is None or self._cached_epoch[0] != epoch:
            self._cached_epoch = (epoch, self._epochs.shuffled(epoch))
        window = self.settings.gradient_accumulation
        return self._cached_epoch[1].micro_batches(place * window, (place + 1) * window)

    def _step(self, number: int) -> StepPlan:
        epoch = self._place(number)[0]

        # Indices run over micro-batches and ranks, so that the noise does not depend on how the batch is
        # split.
        micro_batches: list[MicroBatch] = []
        index = 0
        for draws in self._drawn_in(number):
            drawn = zip(draws.places.tolist(), draws.occurrences.tolist(), strict=True)
            slots = [self._slot(*draw, index=index + at, epoch=epoch) for at, draw in enumerate(drawn)]
            micro_batches.append(_shares(slots, self.settings.num_processes))
            index += len(slots)
        return StepPlan(step=number, epoch=epoch, micro_batches=tuple(micro_batches), num_samples=index)

    def _slot(self, place: int, occurrence: int, *, index: int, epoch: int) -> Slot:
        chosen = self.inputs[place]

        def drawn(purpose: str) -> int:
            """Return 64 bits that depend only on seed, purpose, sample or pair, epoch and repeat."""
            name = chosen.pair or chosen.identity or chosen.variant_id
            return hash_bits(64, self.settings.seed, purpose, name, epoch, occurrence)

        return Slot(
            variant_id=chosen.variant_id,
            index=index,
            epoch=epoch,
            occurrence=occurrence,
            drop_caption=drawn("dropout") / 2**64 < self.settings.dropout_of(chosen.dataset),
            variant=drawn("variant") % chosen.variants,
            view=drawn("view") % chosen.views,
            # Its slot stays, so that the other samples keep their index, and so their noise. The divisor of
            # the loss stays too: without the sample, the gradients of the others are the same.
            weight=0.0 if chosen.variant_id in self.settings.left_out else 1.0,
        )


def _shares(slots: list[Slot], num_ranks: int) -> MicroBatch:
    small, larger = divmod(len(slots), num_ranks)
    shares: list[tuple[Slot, ...]] = []
    start = 0
    for rank in range(num_ranks):
        stop = start + small + (rank < larger)
        # A rank without a slot must still take part in forward, backward and gradient exchange. With weight 0
        # it does not change the result.
        shares.append(tuple(slots[start:stop]) or (replace(slots[0], weight=0.0),))
        start = stop
    return tuple(shares)


def _require_usable(inputs: PlanInputs, settings: PlanSettings) -> None:
    if not inputs:
        raise TrainingError(
            "there is no sample to train on",
            where="the tables of vae_latents and text_embeddings",
            fix="tables/rejected.parquet lists the reason of each rejection",
        )

    if duplicates := inputs.duplicates():
        raise TrainingError(
            counted(len(duplicates), "duplicate sample id"),
            where=duplicates[0],
            fix="start the job again; if the problem returns, report a bug and attach the table",
        )

    # The recipe already validates its settings; the plan may also be built without one.
    counts = (settings.steps, settings.batch_size, settings.gradient_accumulation, settings.num_processes)
    of_inputs = (inputs.repeats, inputs.variants, inputs.views)
    if min(counts) < 1 or min(int(each.min()) for each in of_inputs) < 1:
        fix = "set steps, batch_size, gradient_accumulation, num_processes and repeats to at least 1"
        raise TrainingError(f"all counts must be at least 1, got {settings}", where="training", fix=fix)
    for dropout in (settings.caption_dropout, *settings.dataset_dropouts.values()):
        if not 0.0 <= dropout <= 1.0:
            what = f"caption_dropout must be between 0 and 1, got {dropout}"
            raise TrainingError(what, where="text.caption_dropout", fix="use a number between 0 and 1")


def _require_batches(micro_batches: int, sizes: Mapping[str, int], capacity: int) -> None:
    if micro_batches == 0:
        largest = max(sizes.values())
        raise TrainingError(
            f"no bucket fills a batch: the largest has {counted(largest, 'sample')}, and all processes "
            f"together take {capacity} at once",
            where="buckets.underfilled: drop",
            fix="set underfilled to partial or repeat, lower training.batch_size, or use fewer buckets",
        )


def plan_text(numbers: Mapping[str, Any]) -> str:
    """Return the result of `TrainingPlan.numbers` as a person reads it; whole batches are not mentioned."""
    text = f"{counted(numbers['steps'], 'step')} ({numbers['epochs']:,g} epochs of "
    text += f"{counted(numbers['steps_per_epoch'], 'step')}), "
    text += f"{counted(numbers['global_batch_size'], 'sample')} per step"
    if dropped := numbers["dropped_per_epoch"]:
        return f"{text}; each epoch leaves out {counted(dropped, 'sample')} (buckets.underfilled: drop)"
    if partial := numbers["underfilled_micro_batches"]:
        batches = counted(numbers["micro_batches_per_epoch"], "batch", "batches")
        done = "filled with repeated samples" if numbers["underfilled"] == "repeat" else "smaller"
        text += f"; {partial:,} of {batches} in each epoch {verb(partial, 'is', 'are')} {done}"
    return text
