"""Which samples an epoch shows, and in which order: datasets mixed by repeats, or by sampling weights.

Without weights an epoch is every sample as often as its `repeats` say, shuffled.

With weights w (their sum is 1) each dataset is a queue, shuffled anew whenever it has gone round, and the
queues are drawn from in proportion to w, evenly spread: the j-th draw of a dataset is due at (j + 1/2) / w.
n is a dataset's samples times their repeats; it is exhausted at n / w. What then happens:

    leave      it leaves the mix, and the others go on; an epoch is what it is without weights
    end_epoch  the epoch ends, at the least n / w
    repeat     it goes round again until the last one is exhausted, at the greatest n / w

With the last two a queue goes on in the next epoch where it stood, so in the long run each sample of a
dataset is seen as often as any other of it.

N is a number of draws; a draw names its sample by its place among the plan's samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.trained_lora.plan.samples import Ints, PlanSamples
from pipeline.trained_lora.plan.seeding import hash_bits

Exhausted = Literal["leave", "end_epoch", "repeat"]
"""What becomes of the mix when a dataset has been drawn from once round."""


@dataclass(frozen=True, eq=False, slots=True)
class Draws:
    """Appearances of samples in an epoch, in order.

    Attributes:
        places: (N,): which samples.
        occurrences: (N,): which of the sample's appearances in this epoch, from 0.
        due: (N,): when each is wanted in an epoch that mixes by weights, from 0; None otherwise.
    """

    places: Ints
    occurrences: Ints
    due: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        """How many there are."""
        return len(self.places)

    def take(self, which: npt.NDArray[np.integer[Any]] | slice) -> Draws:
        """Some of them, by their place among these."""
        due = None if self.due is None else self.due[which]
        return Draws(self.places[which], self.occurrences[which], due)

    @staticmethod
    def joined(parts: Sequence[Draws]) -> Draws:
        """One after the other; at least one part, all with `due` or none."""
        due = [part.due for part in parts if part.due is not None]
        return Draws(
            np.concatenate([part.places for part in parts]),
            np.concatenate([part.occurrences for part in parts]),
            np.concatenate(due) if due else None,
        )


class Mix:
    """The draws of each epoch, by bucket; a pure function of what it is made with."""

    def __init__(
        self, samples: PlanSamples, seed: int, weights: Mapping[str, float], exhausted: Exhausted
    ) -> None:
        """Nothing is shuffled yet.

        Args:
            samples: At least one.
            seed: Of every shuffle.
            weights: Of each dataset that has samples, above 0, of any sum; empty to mix by repeats alone.
            exhausted: What happens when a dataset runs out; of no meaning without weights.
        """
        self._seed = seed
        self._samples = samples
        datasets = samples.datasets.names if weights else []
        total = sum((Fraction(weights[name]) for name in datasets), Fraction(0))
        self._weights = {name: Fraction(weights[name]) / total for name in datasets}
        self._round = {name: int(samples.repeats[samples.datasets.members(name)].sum()) for name in datasets}
        self.constant = not weights or exhausted == "leave"
        """Whether every epoch has the same number of draws in each bucket."""
        ends = [self._round[name] / weight for name, weight in self._weights.items()]
        self._length = Fraction(0) if self.constant else (min if exhausted == "end_epoch" else max)(ends)
        self._kept: dict[str, tuple[int, Ints]] = {}

    def sizes(self, epoch: int) -> dict[str, int]:
        """The number of draws in each bucket that has any, by bucket."""
        buckets = self._samples.buckets
        if self.constant:
            sizes = np.bincount(buckets.codes, weights=self._samples.repeats, minlength=len(buckets.names))
        else:
            queued = [buckets.codes[self._queued(dataset, epoch)] for dataset in self._weights]
            sizes = np.bincount(np.concatenate(queued), minlength=len(buckets.names))
        return {name: int(size) for name, size in zip(buckets.names, sizes, strict=True) if size}

    def draws(self, epoch: int) -> dict[str, Draws]:
        """Every draw of the epoch, by bucket, each bucket's in the order in which they are taken."""
        buckets = self._samples.buckets
        if not self._weights:
            return {bucket: self.shuffled(bucket, epoch) for bucket in buckets.names}
        mixed = Draws.joined([self._due(dataset, epoch) for dataset in self._weights])
        assert mixed.due is not None
        mixed = mixed.take(np.lexsort((mixed.occurrences, mixed.places, mixed.due)))
        codes = buckets.codes[mixed.places]
        of_bucket = {name: np.flatnonzero(codes == code) for code, name in enumerate(buckets.names)}
        return {name: mixed.take(which) for name, which in of_bucket.items() if len(which)}

    def shuffled(self, bucket: str, epoch: int) -> Draws:
        """Each of the bucket's samples as often as its repeats say, shuffled; epochs may be negative."""
        return self._shuffled(self._samples.buckets.members(bucket), "sample", epoch)

    def _shuffled(self, members: Ints, purpose: str, turn: int) -> Draws:
        """These samples, in ascending places, as often as their repeats say, shuffled for this turn.

        They are sorted by a hash; those of one hash stand as before.
        """
        repeats = self._samples.repeats[members]
        numbers = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        hashes = (
            hash_bits(64, self._seed, purpose, variant_id, turn, occurrence)
            for variant_id, times in zip(self._samples.ids_at(members), repeats.tolist(), strict=True)
            for occurrence in range(times)
        )
        order = np.argsort(np.fromiter(hashes, dtype=np.uint64, count=len(numbers)), kind="stable")
        return Draws(np.repeat(members, repeats)[order], numbers[order].astype(np.int32))

    def _due(self, dataset: str, epoch: int) -> Draws:
        """What the dataset gives to the epoch, in order."""
        queued, weight = self._queued(dataset, epoch), self._weights[dataset]
        due = (float((place + Fraction(1, 2)) / weight) for place in range(len(queued)))
        return Draws(queued, _times_before(queued), np.fromiter(due, dtype=np.float64, count=len(queued)))

    def _queued(self, dataset: str, epoch: int) -> Ints:
        """The places of what the dataset gives to the epoch, in order."""
        if self.constant:
            return self._once_round(dataset, epoch)
        length = self._length * self._weights[dataset]
        first, last = floor(epoch * length), floor((epoch + 1) * length)
        size = self._round[dataset]
        taken: list[Ints] = [np.empty(0, dtype=np.int32)]
        while first < last:
            turn, start = divmod(first, size)
            taken.append(self._once_round(dataset, turn)[start : start + last - first])
            first = turn * size + min(size, start + last - first)
        return np.concatenate(taken)

    def _once_round(self, dataset: str, turn: int) -> Ints:
        """The dataset's samples, each as often as its repeats say, shuffled; the last turn is kept."""
        kept = self._kept.get(dataset)
        if kept is None or kept[0] != turn:
            members = self._samples.datasets.members(dataset)
            kept = self._kept[dataset] = (turn, self._shuffled(members, "turn of", turn).places)
        return kept[1]


def _times_before(values: Ints) -> Ints:
    """For each value how often it stands further ahead."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    sizes = np.diff(np.r_[starts, len(values)])
    before = np.empty(len(values), dtype=np.int32)
    before[order] = np.arange(len(values)) - np.repeat(starts, sizes)
    return before
