"""The micro-batches of an epoch: which draws share one, and in which order they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.trained_lora.plan.inputs import Ints, turn_name
from pipeline.trained_lora.plan.mixing import Draws, Mix
from pipeline.trained_lora.plan.random_streams import hash_bits

Underfilled = Literal["partial", "repeat", "drop"]
"""Treatment of draws that do not fill a bucket's last micro-batch.

"partial" makes a smaller one, "repeat" fills it with the bucket's first draws of the epoch, and "drop" omits
these draws from the epoch, and others from the next.
"""

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Epoch:
    """The micro-batches of one epoch.

    Attributes:
        draws: All draws, grouped by micro-batch.
        ends: Index in `draws` at which each micro-batch ends.
        order: Indices of the micro-batches in the order in which they run.
    """

    draws: Draws
    ends: Places
    order: Places

    def micro_batches(self, first: int, stop: int) -> list[Draws]:
        """Return the draws of each micro-batch from number `first` up to, but not including, `stop`."""
        chosen: list[int] = self.order[first:stop].tolist()
        return [self.draws.take(slice(self.ends[at - 1] if at else 0, self.ends[at])) for at in chosen]


@dataclass(frozen=True)
class Epochs:
    """Builds the micro-batches of each epoch as a pure function of its attributes.

    `capacity` is the number of draws in a full micro-batch.
    """

    mix: Mix
    seed: int
    capacity: int
    underfilled: Underfilled

    def shuffled(self, epoch: int) -> Epoch:
        """Build an epoch's micro-batches; the turns of the buckets are shuffled."""
        parts: list[Draws] = []
        sizes: list[Places] = []
        turns: list[npt.NDArray[Any]] = []
        for bucket, draws in self.mix.draws(epoch).items():
            # The draws are shuffled within their bucket, so the partial micro-batch differs in each epoch.
            part = self._in_batches(bucket, draws, epoch)
            starts = np.arange(0, len(part), self.capacity)
            parts.append(part)
            sizes.append(np.diff(starts, append=len(part)))
            turns.append(self._turns(bucket, epoch, part, starts.tolist()))

        # The n-th turn of a bucket runs its n-th micro-batch.
        bucket_of = np.repeat(np.arange(len(parts)), [len(of_bucket) for of_bucket in sizes])
        in_turn = bucket_of[np.argsort(np.concatenate(turns), kind="stable")]
        order = np.empty(len(in_turn), dtype=np.int64)
        order[np.argsort(in_turn, kind="stable")] = np.arange(len(in_turn))
        return Epoch(Draws.joined(parts), np.cumsum(np.concatenate(sizes)), order)

    def dropped(self, epoch: int) -> Ints:
        """Return the samples, by index, of the draws that do not fill a micro-batch."""
        mixed = self.mix.draws(epoch).items()
        return np.concatenate([draws.places[self._dropped(bucket, draws, epoch)] for bucket, draws in mixed])

    def _turns(self, bucket: str, epoch: int, draws: Draws, starts: Sequence[int]) -> npt.NDArray[Any]:
        if draws.due is None:
            name = turn_name(bucket)
            turns = (hash_bits(64, self.seed, "turn", name, epoch, number) for number in range(len(starts)))
            return np.fromiter(turns, dtype=np.uint64)

        # If datasets are mixed by weights, a micro-batch runs when its samples are due on average.
        due = [draws.due[start:stop].tolist() for start, stop in pairwise([*starts, len(draws)])]
        return np.array([sum(each) / len(each) for each in due])

    def _in_batches(self, bucket: str, draws: Draws, epoch: int) -> Draws:
        if self.underfilled == "drop":
            return draws.take(np.delete(np.arange(len(draws)), self._dropped(bucket, draws, epoch)))
        missing = -len(draws) % self.capacity
        if self.underfilled == "partial" or missing == 0:
            return draws

        # A filling draw is a further occurrence of its sample, so that its caption dropout is independent.
        turn, which = np.divmod(np.arange(missing), len(draws))
        filling = draws.take(which)
        times = np.bincount(draws.places)[filling.places]
        further = (filling.occurrences + times * (1 + turn)).astype(np.int32)
        due = None if draws.due is None else np.repeat(draws.due[-1:], missing)
        return Draws.joined([draws, Draws(filling.places, further, due)])

    def _dropped(self, bucket: str, draws: Draws, epoch: int) -> Places:
        """Return the draws that the epoch omits."""
        size = len(draws)
        remainder = size % self.capacity
        if not self.mix.constant:
            # Epochs differ in their draws, so no order that all of them share exists.
            return np.arange(size - remainder, size)

        # A window advances by its length each epoch over an order that all epochs share. So no draw is
        # omitted twice before all others were omitted once (FAILURES B02).
        fixed = self.mix.shuffled(bucket, -1)
        place_of = np.empty(size, dtype=np.int64)
        place_of[np.lexsort((fixed.occurrences, fixed.places))] = np.lexsort(
            (draws.occurrences, draws.places)
        )
        return place_of[(epoch * remainder + np.arange(remainder)) % size]
