from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pipeline.models.worker.offload.ring import Ring


@dataclass
class Recorder:
    """A copier that records what is in each slot, and fails if a slot in use is overwritten."""

    slots: dict[int, int] = field(default_factory=dict)
    copies: list[int] = field(default_factory=list)
    waited: set[int] = field(default_factory=set)
    in_use: set[int] = field(default_factory=set)

    def fetch(self, block: int, slot: int) -> None:
        assert slot not in self.slots, "the slot's block was not evicted"
        assert block not in self.slots.values(), "the block is in two slots"
        self.slots[slot] = block
        self.copies.append(block)

    def wait(self, block: int, slot: int) -> None:
        assert self.slots[slot] == block
        self.waited.add(block)
        self.in_use.add(slot)

    def release(self, slot: int) -> None:
        self.in_use.remove(slot)

    def evict(self, block: int, slot: int) -> None:
        assert slot not in self.in_use, "a slot in use was overwritten"
        assert self.slots.pop(slot) == block
        self.waited.discard(block)


def step(ring: Ring, recorder: Recorder, order: list[int], *, training: bool = True) -> None:
    """Run a forward pass in the given order, and the backward pass if it is a training step."""
    for block in order:
        ring.forward_begins(block, with_backward=training)
        assert block in recorder.waited
        ring.forward_ends(block)
    for block in reversed(order) if training else ():
        for _ in range(3):  # the output's gradient, the recompute, and saved weights
            ring.backward_begins(block)
            assert block in recorder.waited


def test_two_slots_copy_each_block_once_per_pass_and_reuse_those_at_the_turns() -> None:
    recorder = Recorder()
    ring = Ring(5, 2, recorder)
    step(ring, recorder, [0, 1, 2, 3, 4])
    assert recorder.copies == [0, 1, 2, 3, 4, 2, 1, 0]
    recorder.copies.clear()
    step(ring, recorder, [0, 1, 2, 3, 4])
    assert recorder.copies == [2, 3, 4, 2, 1, 0]


def test_a_pass_without_gradients_prefetches_the_first_block_of_the_next_one() -> None:
    recorder = Recorder()
    ring = Ring(4, 2, recorder)
    step(ring, recorder, [0, 1, 2, 3], training=False)
    assert recorder.copies == [0, 1, 2, 3, 0]
    assert set(recorder.slots.values()) == {3, 0}


def test_the_order_of_the_first_pass_replaces_that_of_the_model() -> None:
    """A UNet lists its middle block last."""
    recorder, order = Recorder(), [0, 1, 4, 2, 3]
    ring = Ring(5, 2, recorder)
    for _ in range(2):
        step(ring, recorder, order)
    recorder.copies.clear()
    step(ring, recorder, order)
    assert recorder.copies == [4, 2, 3, 4, 1, 0]


def test_an_interrupted_pass_does_not_change_the_order() -> None:
    recorder = Recorder()
    ring = Ring(4, 2, recorder)
    for block in (2, 0):
        ring.forward_begins(block, with_backward=True)
        ring.forward_ends(block)
    step(ring, recorder, [0, 1, 2, 3])
    recorder.copies.clear()
    step(ring, recorder, [0, 1, 2, 3])
    assert recorder.copies == [2, 3, 1, 0]


@given(
    num_blocks=st.integers(1, 9),
    num_slots=st.integers(1, 3),
    passes=st.lists(st.booleans(), min_size=1, max_size=5),
    random=st.randoms(use_true_random=False),
)
def test_a_block_is_on_the_device_when_used_and_no_slot_in_use_is_overwritten(
    num_blocks: int, num_slots: int, passes: list[bool], random: Random
) -> None:
    """The recorder checks each call; the order of the passes is arbitrary."""
    recorder = Recorder()
    ring = Ring(num_blocks, num_slots, recorder)
    for training in passes:
        order = list(range(num_blocks))
        random.shuffle(order)
        step(ring, recorder, order, training=training)
        assert len(recorder.slots) <= min(num_slots, num_blocks)
