"""The samples of an epoch and their order, with datasets mixed by repeats or by sampling weights.

Without weights, an epoch shows every sample `repeats` times, shuffled.

With weights w, normalized to a sum of 1, each dataset is a queue of its n = samples * repeats, which is
shuffled again after each pass. Draws alternate between the queues in proportion to w and evenly spaced: the
j-th draw of a dataset, counted from 0, is due at time (j + 1/2) / w, so a dataset is exhausted at n / w. The
setting `exhausted` selects the behaviour at that time:

    leave      the dataset leaves the mix; the epoch shows the same samples as one without weights
    end_epoch  the epoch ends at the smallest n / w
    repeat     the dataset starts another pass; the epoch ends at the largest n / w

With `end_epoch` and `repeat`, a queue continues in the next epoch at its current position, so that all
samples of a dataset are shown equally often in the long run.

N is a number of draws. A draw refers to its sample by the index among the plan's samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.trained_lora.plan.inputs import Ints, PlanInputs
from pipeline.trained_lora.plan.random_streams import hash_bits

Exhausted = Literal["leave", "end_epoch", "repeat"]
"""Treatment of a dataset after all of its samples have been drawn."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Appearances of samples in an epoch, in order; N is their number.

    Attributes:
        places: Indices of the samples, (N,).
        occurrences: Number of the sample's appearance in this epoch, from 0, (N,).
        due: Time from 0 at which each draw is due, (N,); None without weights.
    """

    places: Ints
    occurrences: Ints
    due: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.places)

    def take(self, which: npt.NDArray[np.integer[Any]] | slice) -> Draws:
        """Return the draws at these indices."""
        due = None if self.due is None else self.due[which]
        return Draws(self.places[which], self.occurrences[which], due)

    @staticmethod
    def joined(parts: Sequence[Draws]) -> Draws:
        """Concatenate at least one part; either all parts have `due`, or none."""
        due = [part.due for part in parts if part.due is not None]
        return Draws(
            np.concatenate([part.places for part in parts]),
            np.concatenate([part.occurrences for part in parts]),
            np.concatenate(due) if due else None,
        )


class Mix:
    """The draws of each epoch by bucket, a pure function of the constructor's arguments."""

    def __init__(
        self, samples: PlanInputs, seed: int, weights: Mapping[str, float], exhausted: Exhausted
    ) -> None:
        """Prepare the mix; epochs are shuffled on first use.

        `weights` are positive, of any sum, for each dataset with samples, or empty to mix by repeats.
        """
        self._seed = seed
        self._samples = samples
        datasets = samples.datasets.names if weights else []
        # Fractions, because the rounding errors of epochs' lengths would add up in the long run.
        total = sum((Fraction(weights[name]) for name in datasets), Fraction(0))
        self._weights = {name: Fraction(weights[name]) / total for name in datasets}
        self._round = {name: int(samples.repeats[samples.datasets.members(name)].sum()) for name in datasets}
        self.constant = not weights or exhausted == "leave"
        """Whether every epoch has the same number of draws in each bucket."""
        self._exhausted = exhausted
        self._kept: dict[str, tuple[int, Ints]] = {}

    def sizes(self, epoch: int) -> dict[str, int]:
        """Return the number of draws of each non-empty bucket."""
        buckets = self._samples.buckets
        if self.constant:
            sizes = np.bincount(buckets.codes, weights=self._samples.repeats, minlength=len(buckets.names))
        else:
            queued = [buckets.codes[self._queued(dataset, epoch)] for dataset in self._weights]
            sizes = np.bincount(np.concatenate(queued), minlength=len(buckets.names))
        return {name: int(size) for name, size in zip(buckets.names, sizes, strict=True) if size}

    def draws(self, epoch: int) -> dict[str, Draws]:
        """Return the draws of the epoch by bucket, in the order in which they are used."""
        buckets = self._samples.buckets
        if not self._weights:
            return {bucket: self.shuffled(bucket, epoch) for bucket in buckets.names}
        mixed = Draws.joined([self._due(dataset, epoch) for dataset in self._weights])
        assert mixed.due is not None

        # Draws of several datasets may be due at the same time; sample and repeat break the tie.
        mixed = mixed.take(np.lexsort((mixed.occurrences, mixed.places, mixed.due)))
        codes = buckets.codes[mixed.places]
        of_bucket = {name: np.flatnonzero(codes == code) for code, name in enumerate(buckets.names)}
        return {name: mixed.take(which) for name, which in of_bucket.items() if len(which)}

    def shuffled(self, bucket: str, epoch: int) -> Draws:
        """Return each of the bucket's samples `repeats` times, shuffled; `epoch` may be negative."""
        return self._shuffled(self._samples.buckets.members(bucket), "sample", epoch)

    def _shuffled(self, members: Ints, purpose: str, turn: int) -> Draws:
        repeats = self._samples.repeats[members]
        # 0, 1, 2, ... for the repeats of each sample.
        numbers = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        names = self._samples.random_names_at(members)
        hashes = (
            hash_bits(64, self._seed, purpose, name, turn, occurrence)
            for name, times in zip(names, repeats.tolist(), strict=True)
            for occurrence in range(times)
        )

        # `members` is ascending, and equal hashes keep its order.
        order = np.argsort(np.fromiter(hashes, dtype=np.uint64), kind="stable")
        return Draws(np.repeat(members, repeats)[order], numbers[order].astype(np.int32))

    def _due(self, dataset: str, epoch: int) -> Draws:
        queued, weight = self._queued(dataset, epoch), self._weights[dataset]
        due = (float((place + Fraction(1, 2)) / weight) for place in range(len(queued)))
        return Draws(queued, _times_before(queued), np.fromiter(due, dtype=np.float64))

    def _queued(self, dataset: str, epoch: int) -> Ints:
        """Return the indices of the samples that the dataset contributes to the epoch, in order."""
        if self.constant:
            return self._once_round(dataset, epoch)
        ends = [self._round[name] / weight for name, weight in self._weights.items()]
        length = (min if self._exhausted == "end_epoch" else max)(ends) * self._weights[dataset]
        # The epoch takes these draws of the dataset's endless queue; the next epoch continues at `last`.
        first, last = floor(epoch * length), floor((epoch + 1) * length)
        size = self._round[dataset]
        taken: list[Ints] = [np.empty(0, dtype=np.int32)]
        while first < last:
            turn, start = divmod(first, size)
            taken.append(self._once_round(dataset, turn)[start : start + last - first])
            first = turn * size + min(size, start + last - first)
        return np.concatenate(taken)

    def _once_round(self, dataset: str, turn: int) -> Ints:
        kept = self._kept.get(dataset)

        # Epochs are read in order, so only the last round is needed again.
        if kept is None or kept[0] != turn:
            members = self._samples.datasets.members(dataset)
            kept = self._kept[dataset] = (turn, self._shuffled(members, "turn of", turn).places)
        return kept[1]


def _times_before(values: Ints) -> Ints:
    """Return for each value how often it occurs before its position."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    sizes = np.diff(np.r_[starts, len(values)])
    before = np.empty(len(values), dtype=np.int32)
    before[order] = np.arange(len(values)) - np.repeat(starts, sizes)
    return before
