"""The training plan: which samples meet in which optimizer step, as an ordinary sequence of exact length.

A plan is a pure function of (samples, seed, batch size, accumulation, world size). It knows neither tensors
nor time, so it is computed on the CPU before anything is launched, is equal in every process, and a resume is
an index into it.

The words used here, from the inside out:

    slot          one sample in its place of a step's global batch; seeds the noise
    share         the slots of one rank in one micro-step, at most `batch_size`
    micro-batch   the shares of all ranks: one forward and backward on each rank; one bucket
    step          up to `gradient_accumulation` micro-batches, then the optimizer
    epoch         each sample as often as its `repeats` say, or what `mix` makes of weights; never shares a
                  step with the next epoch
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import numpy as np
import numpy.typing as npt

from pipeline.errors import TrainingError, counted
from pipeline.trained_lora.plan.batching import Epoch, Epochs, Underfilled
from pipeline.trained_lora.plan.mixing import Draws, Exhausted, Mix
from pipeline.trained_lora.plan.samples import PlanSamples
from pipeline.trained_lora.plan.seeding import hash_bits


@dataclass(frozen=True)
class PlanSettings:
    """What decides a plan beside the samples.

    Attributes:
        steps: Optimizer steps in all, >= 1.
        batch_size: Samples a process in one micro-step, >= 1.
        gradient_accumulation: Micro-steps in a full step, >= 1.
        num_processes: The world size, >= 1.
        caption_dropout: Share of the slots that see the empty caption, in [0, 1].
        seed: Of shuffle, dropout, variants and views.
        underfilled: What becomes of a bucket's remainder.
        weights: Of the datasets, as `Mix` takes them.
        exhausted: What happens when a dataset runs out, where there are weights.
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


@dataclass(frozen=True, slots=True)
class Slot:
    """One sample in its place of a step.

    Attributes:
        variant_id: Which sample.
        index: Place in the step's global batch, counted over micro-batches and ranks; it does not depend on
            how the batch is split over them.
        epoch: From 0.
        occurrence: Which of the sample's repeats in this epoch, from 0.
        drop_caption: Whether the empty caption stands in for its own.
        variant: Which of its captions, from 0.
        view: Which of its latents, from 0.
        weight: 1.0, or 0.0 for the stand-in of a rank that has no sample in this micro-step.
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
"""One share a rank, in rank order; none is empty, all from one bucket."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step.

    Attributes:
        step: From 0.
        epoch: From 0.
        micro_batches: 1 to `gradient_accumulation` of them.
        num_samples: Slots of weight 1 over all micro-batches and ranks; the step's loss is a mean over them.
    """

    step: int
    epoch: int
    micro_batches: tuple[MicroBatch, ...]
    num_samples: int

    def slots(self) -> list[Slot]:
        """The slots of weight 1, by index."""
        return [slot for micro in self.micro_batches for share in micro for slot in share if slot.weight > 0]


class TrainingPlan(Sequence[StepPlan]):
    """All optimizer steps of a run; `plan[i]` costs one epoch's shuffle at most, and the last one is kept."""

    def __init__(self, samples: PlanSamples, settings: PlanSettings) -> None:
        """Check the inputs; nothing is shuffled yet.

        Raises:
            TrainingError: There is no sample, a variant_id stands there twice, or a setting is out of range.
        """
        self.settings = settings
        self.samples = samples
        _require_usable(samples, settings)
        self._capacity = settings.batch_size * settings.num_processes
        self._mix = Mix(samples, settings.seed, settings.weights, settings.exhausted)
        self._epochs = Epochs(self._mix, settings.seed, self._capacity, settings.underfilled)
        self._bucket_sizes = self._mix.sizes(0)
        self.steps_per_epoch = self._steps_of(0)
        self._starts = [0, self.steps_per_epoch]
        while not self._mix.constant and self._starts[-1] < settings.steps:
            self._starts.append(self._starts[-1] + self._steps_of(len(self._starts) - 1))
        self._kept: tuple[int, Epoch] | None = None

    @staticmethod
    def steps_in(samples: PlanSamples, settings: PlanSettings, epochs: int) -> int:
        """The optimizer steps of so many whole epochs; the `steps` of the settings are not looked at.

        Raises:
            TrainingError: As the plan itself.
        """
        plan = TrainingPlan(samples, replace(settings, steps=1))
        if plan._mix.constant:
            return epochs * plan.steps_per_epoch
        return sum(plan._steps_of(epoch) for epoch in range(epochs))

    def __len__(self) -> int:
        """The number of optimizer steps, exactly."""
        return self.settings.steps

    @overload
    def __getitem__(self, index: int) -> StepPlan: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepPlan]: ...
    def __getitem__(self, index: int | slice) -> StepPlan | list[StepPlan]:
        """The step of that number, or those of a slice."""
        if isinstance(index, slice):
            return [self._step(number) for number in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"step {index} of a plan of {len(self)} steps")
        return self._step(number)

    def iterate(self, start: int = 0) -> Iterator[tuple[int, StepPlan]]:
        """(step, batch) from `start` to the end; nothing when `start` is the length."""
        for number in range(start, len(self)):
            yield number, self._step(number)

    def times_seen(self) -> npt.NDArray[np.int64]:
        """How often each of `samples` is trained on over the whole plan; 0 for never."""
        whole, rest = divmod(len(self), self.steps_per_epoch)
        even = self._mix.constant and (self.settings.underfilled == "partial" or self._remainder() == 0)
        seen = self.samples.repeats.astype(np.int64) * (whole if even else 0)
        for number in range(len(self) - rest if even else 0, len(self)):
            for draws in self._drawn_in(number):
                np.add.at(seen, draws.places, 1)
        return seen

    def numbers(self) -> dict[str, int | float | str]:
        """Facts for the log and the report, all of the first epoch but `epochs` and `steps`."""
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
        """How many draws of which samples an epoch leaves out, by variant_id; only `drop` leaves out any."""
        if self.settings.underfilled != "drop":
            return {}
        places, times = np.unique(self._epochs.left_out(epoch), return_counts=True)
        return dict(zip(self.samples.ids_at(places), times.tolist(), strict=True))

    @property
    def num_epochs(self) -> int:
        """How many epochs there are, the last one perhaps cut short."""
        return self._place(len(self) - 1)[0] + 1

    def _num_epochs(self) -> float:
        if self._mix.constant:
            return len(self) / self.steps_per_epoch
        epoch, place = self._place(len(self) - 1)
        return epoch + (place + 1) / (self._starts[epoch + 1] - self._starts[epoch])

    def _place(self, number: int) -> tuple[int, int]:
        """The epoch of a step, and which of its steps it is."""
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
        """Draws of an epoch that fill no micro-batch of their bucket."""
        return sum(size % self._capacity for size in self._bucket_sizes.values())

    def _drawn_in(self, number: int) -> list[Draws]:
        """The draws of each micro-batch of a step."""
        epoch, place = self._place(number)
        if self._kept is None or self._kept[0] != epoch:
            self._kept = (epoch, self._epochs.shuffled(epoch))
        window = self.settings.gradient_accumulation
        return self._kept[1].micro_batches(place * window, (place + 1) * window)

    def _step(self, number: int) -> StepPlan:
        epoch = self._place(number)[0]
        micro_batches: list[MicroBatch] = []
        index = 0
        for draws in self._drawn_in(number):
            drawn = zip(draws.places.tolist(), draws.occurrences.tolist(), strict=True)
            slots = [self._slot(*draw, index=index + at, epoch=epoch) for at, draw in enumerate(drawn)]
            micro_batches.append(_shares(slots, self.settings.num_processes))
            index += len(slots)
        return StepPlan(step=number, epoch=epoch, micro_batches=tuple(micro_batches), num_samples=index)

    def _slot(self, place: int, occurrence: int, *, index: int, epoch: int) -> Slot:
        sample = self.samples[place]

        def drawn(purpose: str) -> int:
            """64 bits that depend on nothing but seed, sample, epoch, and which of its repeats it is."""
            return hash_bits(64, self.settings.seed, purpose, sample.variant_id, epoch, occurrence)

        return Slot(
            variant_id=sample.variant_id,
            index=index,
            epoch=epoch,
            occurrence=occurrence,
            drop_caption=drawn("dropout") / 2**64 < self.settings.caption_dropout,
            variant=drawn("variant") % sample.variants if sample.variants > 1 else 0,
            view=drawn("view") % sample.views if sample.views > 1 else 0,
        )


def _shares(slots: list[Slot], num_ranks: int) -> MicroBatch:
    """The slots split over the ranks, in order, sizes differing by one at most.

    A rank without a slot gets the first one with weight 0: it takes part in forward, backward and the
    exchange of gradients, and changes nothing.
    """
    small, larger = divmod(len(slots), num_ranks)
    shares: list[tuple[Slot, ...]] = []
    start = 0
    for rank in range(num_ranks):
        stop = start + small + (rank < larger)
        shares.append(tuple(slots[start:stop]) or (_stand_in(slots[0]),))
        start = stop
    return tuple(shares)


def _stand_in(slot: Slot) -> Slot:
    return replace(slot, weight=0.0)


def _require_usable(samples: PlanSamples, settings: PlanSettings) -> None:
    if not samples:
        raise TrainingError(
            "there is no sample to train on",
            where="the tables of vae_latents and text_embeddings",
            fix="see tables/rejected.parquet for why all of them were rejected",
        )
    if twice := samples.twice():
        fix = "materialize vae_latents again; if it comes back, report it as a defect"
        raise TrainingError(f"{len(twice)} sample ids stand there twice", where=twice[0], fix=fix)
    counts = (settings.steps, settings.batch_size, settings.gradient_accumulation, settings.num_processes)
    of_samples = (samples.repeats, samples.variants, samples.views)
    if min(counts) < 1 or min(int(each.min()) for each in of_samples) < 1:
        fix = "let steps, batch_size, gradient_accumulation, num_processes and repeats be at least 1"
        raise TrainingError(f"a count below 1 in {settings}", where="training", fix=fix)
    if not 0.0 <= settings.caption_dropout <= 1.0:
        what = f"caption dropout {settings.caption_dropout} is no share"
        raise TrainingError(what, where="text.caption_dropout", fix="use a number from 0 to 1")


def _require_batches(micro_batches: int, sizes: Mapping[str, int], capacity: int) -> None:
    if micro_batches == 0:
        largest = max(sizes.values())
        raise TrainingError(
            f"no bucket fills a batch: the largest has {counted(largest, 'sample')}, and all processes "
            f"together take {capacity} at once",
            where="buckets.underfilled: drop",
            fix="set underfilled to partial or repeat, lower training.batch_size, or use fewer buckets",
        )
