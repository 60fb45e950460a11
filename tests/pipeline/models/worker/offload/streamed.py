"""Stores that overwrite every evicted copy with NaN, count the blocks on the device, and end the process."""

from __future__ import annotations

import os
import signal
from typing import ClassVar

from pipeline.models.worker.offload.host_store import CpuStore

NAN_BYTE = 0xFF
"""A byte that makes a NaN of every floating-point format if all bytes of a number have it."""


class PoisoningStore(CpuStore):
    """The CPU's store, with new memory for every copy, which is NaN once its block is evicted.

    In the same memory, a weight that was kept from an earlier copy would be correct again after the next one.

    Attributes:
        on_device: Blocks that are in a slot.
        most_on_device: Largest number of them so far.
        num_copies: Number of copies so far.
    """

    def allocate(self) -> None:
        super().allocate()
        self.on_device: set[int] = set()
        self.most_on_device = 0
        self.num_copies = 0
        for slot in self.slots:
            slot.fill_(NAN_BYTE)

    def fetch(self, block: int, slot: int) -> None:
        self.on_device.add(block)
        self.most_on_device = max(self.most_on_device, len(self.on_device))
        self.num_copies += 1
        self.slots[slot] = self.slots[slot].clone()
        super().fetch(block, slot)

    def evict(self, block: int, slot: int) -> None:
        super().evict(block, slot)
        self.slots[slot].fill_(NAN_BYTE)
        self.on_device.remove(block)


class KillingStore(PoisoningStore):
    """A store that ends its process with SIGKILL instead of a copy, once `kill_after` was called."""

    _copies_left: ClassVar[int | None] = None

    @classmethod
    def kill_after(cls, num_copies: int) -> None:
        """End the process instead of the copy after `num_copies` others; the first call decides."""
        if cls._copies_left is None:
            cls._copies_left = num_copies

    def fetch(self, block: int, slot: int) -> None:
        cls = type(self)
        if cls._copies_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if cls._copies_left is not None:
            cls._copies_left -= 1
        super().fetch(block, slot)
