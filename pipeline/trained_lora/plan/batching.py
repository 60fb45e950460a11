"""The micro-batches of an epoch: which draws are together in one, and when it has its turn.

A draw is known by its place in a bucket's draws, a micro-batch by its place in the epoch, bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.trained_lora.plan.mixing import Draws, Mix
from pipeline.trained_lora.plan.samples import Ints
from pipeline.trained_lora.plan.seeding import hash_bits

Underfilled = Literal["partial", "repeat", "drop"]
"""What becomes of the samples that do not fill a bucket's last micro-batch: a smaller one; one filled up with
others of the bucket, from the epoch's order; or none in this epoch, and others in the next."""

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Epoch:
    """The micro-batches of one epoch.

    Attributes:
        draws: Of all, those of one micro-batch together.
        ends: Of each micro-batch where its draws end.
        order: In which the micro-batches come.
    """

    draws: Draws
    ends: Places
    order: Places

    def micro_batches(self, first: int, stop: int) -> list[Draws]:
        """The draws of each micro-batch from number `first` on, up to `stop` or the last one."""
        chosen: list[int] = self.order[first:stop].tolist()
        return [self.draws.take(slice(self.ends[at - 1] if at else 0, self.ends[at])) for at in chosen]


@dataclass(frozen=True)
class Epochs:
    """Makes them; a pure function of its attributes.

    Attributes:
        mix: Gives the draws.
        seed: Of the turns.
        capacity: Draws of a full micro-batch.
        underfilled: What becomes of a bucket's remainder.
    """

    mix: Mix
    seed: int
    capacity: int
    underfilled: Underfilled

    def shuffled(self, epoch: int) -> Epoch:
        """An epoch's micro-batches.

        Samples are shuffled inside their bucket, which also rotates who is in the partial micro-batch; then
        the turns of the buckets are shuffled, each bucket giving its micro-batches in its own order. Where
        datasets are mixed by weights, a micro-batch's turn is when its samples are due on average.
        """
        parts: list[Draws] = []
        sizes: list[Places] = []
        turns: list[npt.NDArray[Any]] = []
        for bucket, draws in self.mix.draws(epoch).items():
            part = self._in_batches(bucket, draws, epoch)
            starts = np.arange(0, len(part), self.capacity)
            parts.append(part)
            sizes.append(np.diff(starts, append=len(part)))
            turns.append(self._turns(bucket, epoch, part, starts.tolist()))
        bucket_of = np.repeat(np.arange(len(parts)), [len(of_bucket) for of_bucket in sizes])
        in_turn = bucket_of[np.argsort(np.concatenate(turns), kind="stable")]
        order = np.empty(len(in_turn), dtype=np.int64)
        order[np.argsort(in_turn, kind="stable")] = np.arange(len(in_turn))
        return Epoch(Draws.joined(parts), np.cumsum(np.concatenate(sizes)), order)

    def left_out(self, epoch: int) -> Ints:
        """The samples of the draws that do not fill a micro-batch, by their places among the plan's."""
        mixed = self.mix.draws(epoch).items()
        return np.concatenate([draws.places[self._left_out(bucket, draws, epoch)] for bucket, draws in mixed])

    def _turns(self, bucket: str, epoch: int, draws: Draws, starts: Sequence[int]) -> npt.NDArray[Any]:
        """When each of a bucket's micro-batches has its turn, by their starts among its draws."""
        if draws.due is None:
            turns = (hash_bits(64, self.seed, "turn", bucket, epoch, number) for number in range(len(starts)))
            return np.fromiter(turns, dtype=np.uint64, count=len(starts))
        due = [draws.due[start:stop].tolist() for start, stop in pairwise([*starts, len(draws)])]
        return np.array([sum(each) / len(each) for each in due])

    def _in_batches(self, bucket: str, draws: Draws, epoch: int) -> Draws:
        """The bucket's draws, cut or filled up to whole micro-batches where the recipe asks for it.

        What fills up is a further occurrence, so that its dropout is drawn anew.
        """
        if self.underfilled == "drop":
            return draws.take(np.delete(np.arange(len(draws)), self._left_out(bucket, draws, epoch)))
        missing = -len(draws) % self.capacity
        if self.underfilled == "partial" or missing == 0:
            return draws
        turn, which = np.divmod(np.arange(missing), len(draws))
        filling = draws.take(which)
        times = np.bincount(draws.places)[filling.places]
        further = (filling.occurrences + times * (1 + turn)).astype(np.int32)
        due = None if draws.due is None else np.repeat(draws.due[-1:], missing)
        return Draws.joined([draws, Draws(filling.places, further, due)])

    def _left_out(self, bucket: str, draws: Draws, epoch: int) -> Places:
        """Which of the draws the epoch leaves out: a window that moves on by its own length each epoch.

        So no draw is left out twice before every other was left out once (FAILURES B02). Where epochs differ
        in their draws it is the last ones.
        """
        size = len(draws)
        remainder = size % self.capacity
        if not self.mix.constant:
            return np.arange(size - remainder, size)
        fixed = self.mix.shuffled(bucket, -1)
        place_of = np.empty(size, dtype=np.int64)
        place_of[np.lexsort((fixed.occurrences, fixed.places))] = np.lexsort(
            (draws.occurrences, draws.places)
        )
        return place_of[(epoch * remainder + np.arange(remainder)) % size]
