"""Which streamed block is in which slot of the device, and which one is copied next.

A training step uses the streamed blocks in forward order, then in reverse order for recompute and backward:

    s0 s1 s2 s3 | s3 s2 s1 s0      a pass without gradients is only the first half

The ring knows blocks and slots by their numbers. A `Copier` moves the weights, so that the same schedule
drives a GPU, the CPU of the tests and a simulation.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Protocol


class Copier(Protocol):
    """Moves weights between host and device."""

    def fetch(self, block: int, slot: int) -> None:
        """Start to copy a block into a slot, after the last use of the slot has ended."""
        ...

    def wait(self, block: int, slot: int) -> None:
        """Let later computation wait for the copy of `fetch`, and see its weights."""
        ...

    def release(self, slot: int) -> None:
        """Record that the computation enqueued so far was the last use of a slot."""
        ...

    def evict(self, block: int, slot: int) -> None:
        """Make the weights of a block unreadable, because its slot gets another block."""
        ...


class Ring:
    """Slots that hold streamed blocks, with prefetch in the order in which blocks are used.

    At most one block is in use at a time. Its slot is not overwritten before `forward_ends`, or in the
    backward pass, before the backward pass of another block begins.
    """

    def __init__(self, num_blocks: int, num_slots: int, copier: Copier) -> None:
        """Begin with empty slots and the order 0, 1, 2, ...; the first complete pass corrects the order."""
        self._copier = copier
        self._blocks: list[int | None] = [None] * min(num_slots, num_blocks)
        self._last_use = [0] * len(self._blocks)
        self._num_uses = 0
        self._in_use: int | None = None
        self._backward: int | None = None

        self._order = list(range(num_blocks))
        self._visited: list[int] = []

    def slot_of(self, block: int) -> int:
        """Return the slot of a block in use."""
        return self._blocks.index(block)

    def forward_begins(self, block: int, *, with_backward: bool) -> None:
        """Make a block's weights readable for its forward pass, which a backward pass may follow."""
        self._learn_order(block)
        self._backward = None
        self._use(block)
        place = self._order.index(block)

        # After the last block, a backward pass needs the same block again, and a new pass the first one.
        then = self._order[::-1] if with_backward else self._order
        self._prefetch(chain(self._order[place + 1 :], then))

    def forward_ends(self, block: int) -> None:
        """Let the slot of a block be overwritten."""
        if self._in_use == block and self._backward is None:
            self._end_use()

    def backward_begins(self, block: int) -> None:
        """Make a block's weights readable for its backward pass; repeated calls have no effect.

        They stay readable until the backward pass of another block begins.
        """
        if self._backward == block:
            return
        self._backward = block
        self._use(block)
        place = self._order.index(block)
        self._prefetch(chain(self._order[:place][::-1], self._order))

    def _learn_order(self, block: int) -> None:
        # A model may list its blocks in another order than it uses them.
        if self._backward is not None or block in self._visited:
            if len(self._visited) == len(self._order):
                self._order = self._visited
            self._visited = []
        self._visited.append(block)

    def _use(self, block: int) -> None:
        self._end_use()
        if block not in self._blocks:
            self._fetch(block, self._oldest(range(len(self._blocks))))
        slot = self.slot_of(block)
        self._copier.wait(block, slot)
        self._in_use = block
        self._num_uses += 1
        self._last_use[slot] = self._num_uses

    def _end_use(self) -> None:
        if self._in_use is not None:
            self._copier.release(self.slot_of(self._in_use))
            self._in_use = None

    def _prefetch(self, upcoming: Iterable[int]) -> None:
        others = dict.fromkeys(block for block in upcoming if block != self._in_use)
        wanted = list(islice(others, len(self._blocks) - 1))
        for block in wanted:
            if block not in self._blocks:
                busy = {self._in_use, *wanted}
                free = [slot for slot, loaded in enumerate(self._blocks) if loaded not in busy]
                self._fetch(block, self._oldest(free))

    def _oldest(self, slots: Iterable[int]) -> int:
        return min(slots, key=self._last_use.__getitem__)

    def _fetch(self, block: int, slot: int) -> None:
        evicted = self._blocks[slot]
        if evicted is not None:
            self._copier.evict(evicted, slot)
        self._blocks[slot] = block
        self._copier.fetch(block, slot)
