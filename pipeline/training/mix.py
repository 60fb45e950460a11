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
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Literal

from pipeline.training.seeding import hash_bits

Exhausted = Literal["leave", "end_epoch", "repeat"]
"""What becomes of the mix when a dataset has been drawn from once round."""


@dataclass(frozen=True, slots=True)
class PlanSample:
    """One sample as the plan sees it: `bucket` decides who may share a micro-batch, counts are >= 1."""

    sample_id: str
    bucket: str
    repeats: int = 1
    variants: int = 1
    views: int = 1
    dataset: str = ""


@dataclass(frozen=True, slots=True)
class Draw:
    """A sample's one appearance in an epoch.

    Attributes:
        sample_id: Which sample.
        occurrence: Which of its appearances in this epoch, from 0.
        due: When it is wanted in an epoch that mixes by weights, from 0; 0.0 otherwise.
    """

    sample_id: str
    occurrence: int
    due: float = 0.0


class Mix:
    """The draws of each epoch, by bucket; a pure function of what it is made with."""

    def __init__(
        self, samples: Sequence[PlanSample], seed: int, weights: Mapping[str, float], exhausted: Exhausted
    ) -> None:
        """Group the samples.

        Args:
            samples: Sorted by sample_id.
            seed: Of every shuffle.
            weights: Of each dataset that has samples, above 0, of any sum; empty to mix by repeats alone.
            exhausted: What happens when a dataset runs out; of no meaning without weights.
        """
        self._seed = seed
        self._buckets = {sample.sample_id: sample.bucket for sample in samples} if weights else {}
        self._by_bucket = _grouped(samples, lambda sample: sample.bucket)
        self._weighted = bool(weights)
        self._datasets = _grouped(samples, lambda sample: sample.dataset) if weights else {}
        total = sum((Fraction(weights[name]) for name in self._datasets), Fraction(0))
        self._weights = {name: Fraction(weights[name]) / total for name in self._datasets}
        self._round = {name: sum(each.repeats for each in of) for name, of in self._datasets.items()}
        self.constant = not weights or exhausted == "leave"
        """Whether every epoch has the same number of draws in each bucket."""
        ends = [self._round[name] / weight for name, weight in self._weights.items()]
        self._length = Fraction(0) if self.constant else (min if exhausted == "end_epoch" else max)(ends)
        self._kept: dict[tuple[str, int], list[str]] = {}

    def sizes(self, epoch: int) -> dict[str, int]:
        """The number of draws in each bucket that has any, by bucket."""
        if self.constant:
            sizes = {bucket: sum(each.repeats for each in of) for bucket, of in self._by_bucket.items()}
        else:
            sizes = Counter(
                self._buckets[name] for dataset in self._datasets for name in self._queued(dataset, epoch)
            )
        return dict(sorted(sizes.items()))

    def draws(self, epoch: int) -> dict[str, list[Draw]]:
        """Every draw of the epoch, by bucket, each bucket's in the order in which they are taken."""
        if not self._weighted:
            return {bucket: self.shuffled(bucket, epoch) for bucket in sorted(self._by_bucket)}
        mixed: defaultdict[str, list[Draw]] = defaultdict(list)
        for draw in sorted(self._due(epoch), key=lambda draw: (draw.due, draw.sample_id, draw.occurrence)):
            mixed[self._buckets[draw.sample_id]].append(draw)
        return dict(sorted(mixed.items()))

    def shuffled(self, bucket: str, epoch: int) -> list[Draw]:
        """Each of the bucket's samples as often as its repeats say, shuffled; epochs may be negative."""
        order = sorted(
            (
                hash_bits(64, self._seed, "sample", sample.sample_id, epoch, occurrence),
                sample.sample_id,
                occurrence,
            )
            for sample in self._by_bucket[bucket]
            for occurrence in range(sample.repeats)
        )
        return [Draw(sample_id, occurrence) for _, sample_id, occurrence in order]

    def _due(self, epoch: int) -> Iterable[Draw]:
        for dataset, weight in self._weights.items():
            seen = Counter[str]()
            for place, sample_id in enumerate(self._queued(dataset, epoch)):
                yield Draw(sample_id, seen[sample_id], float((place + Fraction(1, 2)) / weight))
                seen[sample_id] += 1

    def _queued(self, dataset: str, epoch: int) -> list[str]:
        """What the dataset gives to the epoch, in order."""
        if self.constant:
            return self._once_round(dataset, epoch)
        length = self._length * self._weights[dataset]
        first, last = floor(epoch * length), floor((epoch + 1) * length)
        size = self._round[dataset]
        taken: list[str] = []
        while first < last:
            turn, start = divmod(first, size)
            taken += self._once_round(dataset, turn)[start : start + last - first]
            first = turn * size + min(size, start + last - first)
        return taken

    def _once_round(self, dataset: str, turn: int) -> list[str]:
        """The dataset's samples, each as often as its repeats say, shuffled; the last turn is kept."""
        if (dataset, turn) not in self._kept:
            self._kept = {key: order for key, order in self._kept.items() if key[0] != dataset}
            order = sorted(
                (hash_bits(64, self._seed, "turn of", sample.sample_id, turn, repeat), sample.sample_id)
                for sample in self._datasets[dataset]
                for repeat in range(sample.repeats)
            )
            self._kept[dataset, turn] = [sample_id for _, sample_id in order]
        return self._kept[dataset, turn]


def _grouped(samples: Sequence[PlanSample], by: Callable[[PlanSample], str]) -> dict[str, list[PlanSample]]:
    groups: defaultdict[str, list[PlanSample]] = defaultdict(list)
    for sample in samples:
        groups[by(sample)].append(sample)
    return dict(sorted(groups.items()))
