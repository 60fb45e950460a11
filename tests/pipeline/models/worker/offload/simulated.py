"""A device with one lane of copies and one of computation, whose durations are given."""

from __future__ import annotations

from collections.abc import Sequence


class SimulatedDevice:
    """A copier that advances clocks, as a copy stream, a compute stream and their events do.

    Attributes:
        computed_s: Time at which the computation enqueued so far ends.
        copied_s: Time at which the copies enqueued so far end.
    """

    def __init__(self, num_slots: int, copy_s: Sequence[float]) -> None:
        self.computed_s = self.copied_s = 0.0
        self._copy_s = copy_s
        self._ready = [0.0] * num_slots
        self._free = [0.0] * num_slots

    def fetch(self, block: int, slot: int) -> None:
        self.copied_s = max(self.copied_s, self._free[slot]) + self._copy_s[block]
        self._ready[slot] = self.copied_s

    def wait(self, block: int, slot: int) -> None:
        self.computed_s = max(self.computed_s, self._ready[slot])

    def release(self, slot: int) -> None:
        self._free[slot] = self.computed_s

    def evict(self, block: int, slot: int) -> None: ...
