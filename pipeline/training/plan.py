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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Literal, overload

from pipeline.counting import counted
from pipeline.errors import TrainingError
from pipeline.training.mix import Draw, Exhausted, Mix, PlanSample
from pipeline.training.seeding import hash_bits

Underfilled = Literal["partial", "repeat", "drop"]
"""What becomes of the samples that do not fill a bucket's last micro-batch: a smaller one; one filled up with
others of the bucket, from the epoch's order; or none in this epoch, and others in the next."""


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
        sample_id: Which sample.
        index: Place in the step's global batch, counted over micro-batches and ranks; it does not depend on
            how the batch is split over them.
        epoch: From 0.
        occurrence: Which of the sample's repeats in this epoch, from 0.
        drop_caption: Whether the empty caption stands in for its own.
        variant: Which of its captions, from 0.
        view: Which of its latents, from 0.
        weight: 1.0, or 0.0 for the stand-in of a rank that has no sample in this micro-step.
    """

    sample_id: str
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

    def __init__(self, samples: Iterable[PlanSample], settings: PlanSettings) -> None:
        """Check the inputs; nothing is shuffled yet.

        Raises:
            TrainingError: There is no sample, a sample_id stands there twice, or a setting is out of range.
        """
        self.settings = settings
        self.samples = tuple(sorted(samples, key=lambda sample: sample.sample_id))
        _require_usable(self.samples, settings)
        self._by_id = {sample.sample_id: sample for sample in self.samples}
        self._capacity = settings.batch_size * settings.num_processes
        self._mix = Mix(self.samples, settings.seed, settings.weights, settings.exhausted)
        self._bucket_sizes = self._mix.sizes(0)
        self.steps_per_epoch = self._steps_of(0)
        self._starts = [0, self.steps_per_epoch]
        while not self._mix.constant and self._starts[-1] < settings.steps:
            self._starts.append(self._starts[-1] + self._steps_of(len(self._starts) - 1))
        self._epoch: tuple[int, list[list[Draw]]] = (-1, [])

    @staticmethod
    def steps_in(samples: Iterable[PlanSample], settings: PlanSettings, epochs: int) -> int:
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

    def times_seen(self) -> dict[str, int]:
        """How often each sample is trained on over the whole plan, by sample_id; 0 for never."""
        whole, rest = divmod(len(self), self.steps_per_epoch)
        even = self._mix.constant and (self.settings.underfilled == "partial" or self._remainder() == 0)
        seen = {sample.sample_id: sample.repeats * whole if even else 0 for sample in self.samples}
        for number in range(len(self) - rest if even else 0, len(self)):
            for slot in self._step(number).slots():
                seen[slot.sample_id] += 1
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
            "epochs": round(self._epochs(), 3),
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
        """How many draws of which samples an epoch leaves out, by sample_id; only `drop` leaves out any."""
        if self.settings.underfilled != "drop":
            return {}
        left_out = Counter[str]()
        for bucket, draws in self._mix.draws(epoch).items():
            left_out.update(draw.sample_id for draw in self._left_out(bucket, draws, epoch))
        return dict(sorted(left_out.items()))

    @property
    def num_epochs(self) -> int:
        """How many epochs there are, the last one perhaps cut short."""
        return self._place(len(self) - 1)[0] + 1

    def _epochs(self) -> float:
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

    def _step(self, number: int) -> StepPlan:
        epoch, place = self._place(number)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._shuffled(epoch))
        window = self.settings.gradient_accumulation
        groups = self._epoch[1][place * window : (place + 1) * window]
        micro_batches: list[MicroBatch] = []
        index = 0
        for group in groups:
            slots = [self._slot(draw, index + at, epoch) for at, draw in enumerate(group)]
            micro_batches.append(_shares(slots, self.settings.num_processes))
            index += len(group)
        return StepPlan(step=number, epoch=epoch, micro_batches=tuple(micro_batches), num_samples=index)

    def _slot(self, draw: Draw, index: int, epoch: int) -> Slot:
        sample = self._by_id[draw.sample_id]
        return Slot(
            sample_id=draw.sample_id,
            index=index,
            epoch=epoch,
            occurrence=draw.occurrence,
            drop_caption=self._drawn("dropout", draw, epoch) / 2**64 < self.settings.caption_dropout,
            variant=self._drawn("variant", draw, epoch) % sample.variants if sample.variants > 1 else 0,
            view=self._drawn("view", draw, epoch) % sample.views if sample.views > 1 else 0,
        )

    def _drawn(self, purpose: str, draw: Draw, epoch: int) -> int:
        """64 bits that depend on nothing but the seed, the sample, the epoch, and which of its repeats."""
        return hash_bits(64, self.settings.seed, purpose, draw.sample_id, epoch, draw.occurrence)

    def _shuffled(self, epoch: int) -> list[list[Draw]]:
        """An epoch's micro-batches, in order.

        Samples are shuffled inside their bucket, which also rotates who is in the partial micro-batch; then
        the turns of the buckets are shuffled, each bucket giving its micro-batches in its own order. Where
        datasets are mixed by weights, a micro-batch's turn is when its samples are due on average.
        """
        turns: list[tuple[float, str]] = []
        batches: dict[str, Iterator[list[Draw]]] = {}
        for bucket, draws in self._mix.draws(epoch).items():
            mixed = self._in_batches(bucket, draws, epoch)
            starts = range(0, len(mixed), self._capacity)
            groups = [mixed[start : start + self._capacity] for start in starts]
            batches[bucket] = iter(groups)
            turns += [(self._turn(bucket, epoch, turn, group), bucket) for turn, group in enumerate(groups)]
        return [next(batches[bucket]) for _, bucket in sorted(turns)]

    def _turn(self, bucket: str, epoch: int, turn: int, group: Sequence[Draw]) -> float:
        if self.settings.weights:
            return sum(draw.due for draw in group) / len(group)
        return hash_bits(64, self.settings.seed, "turn", bucket, epoch, turn)

    def _in_batches(self, bucket: str, draws: list[Draw], epoch: int) -> list[Draw]:
        """The bucket's draws, cut or filled up to whole micro-batches where the recipe asks for it.

        What fills up is a further occurrence, so that its dropout is drawn anew.
        """
        if self.settings.underfilled == "drop":
            left_out = set(self._left_out(bucket, draws, epoch))
            return [draw for draw in draws if draw not in left_out]
        missing = -len(draws) % self._capacity
        if self.settings.underfilled == "partial" or missing == 0:
            return draws
        times = Counter(draw.sample_id for draw in draws)
        filling = [(at // len(draws), draws[at % len(draws)]) for at in range(missing)]
        return draws + [
            Draw(draw.sample_id, draw.occurrence + times[draw.sample_id] * (1 + turn), draws[-1].due)
            for turn, draw in filling
        ]

    def _left_out(self, bucket: str, draws: Sequence[Draw], epoch: int) -> list[Draw]:
        """The draws that the epoch leaves out: a window that moves on by its own length each epoch.

        So no draw is left out twice before every other was left out once (FAILURES B02). Where epochs differ
        in their draws it is the last ones.
        """
        size = len(draws)
        remainder = size % self._capacity
        if not self._mix.constant:
            return list(draws[size - remainder :])
        if self.settings.weights:
            by_name = {(draw.sample_id, draw.occurrence): draw for draw in draws}
            fixed = [by_name[draw.sample_id, draw.occurrence] for draw in self._mix.shuffled(bucket, -1)]
        else:
            fixed = self._mix.shuffled(bucket, -1)
        return [fixed[(epoch * remainder + at) % size] for at in range(remainder)]


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


def _require_usable(samples: Sequence[PlanSample], settings: PlanSettings) -> None:
    if not samples:
        raise TrainingError(
            "there is no sample to train on",
            where="the tables of vae_latents and text_embeddings",
            fix="see tables/rejected.parquet for why all of them were rejected",
        )
    names = map(attrgetter("sample_id"), samples)
    twice = [name for name, times in groupby(names) if len(list(times)) > 1]
    if twice:
        fix = "materialize vae_latents again; if it comes back, report it as a defect"
        raise TrainingError(f"{len(twice)} sample ids stand there twice", where=twice[0], fix=fix)
    counts = (settings.steps, settings.batch_size, settings.gradient_accumulation, settings.num_processes)
    if min(counts) < 1 or min(min(each.repeats, each.variants, each.views) for each in samples) < 1:
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
