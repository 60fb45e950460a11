"""The ring on a simulated device: one lane of copies and one of computation, with given durations."""

from __future__ import annotations

import pytest

from pipeline.models.worker.offload.ring import Ring
from tests.pipeline.models.worker.offload.simulated import SimulatedDevice


def step_s(num_blocks: int, num_slots: int, copy_s: float, compute_s: float, *, resident: int = 0) -> float:
    """Return the duration of a training step after two others.

    A block's forward pass takes `compute_s`, its recompute and backward pass three times as long. After each
    streamed block come `resident` blocks that stay on the device.
    """
    device = SimulatedDevice(num_slots, [copy_s] * num_blocks)
    ring = Ring(num_blocks, num_slots, device)
    end_s = []
    for _ in range(3):
        for block in range(num_blocks):
            ring.forward_begins(block, with_backward=True)
            device.computed_s += compute_s
            ring.forward_ends(block)
            device.computed_s += resident * compute_s
        for block in reversed(range(num_blocks)):
            device.computed_s += 3 * resident * compute_s
            ring.backward_begins(block)
            device.computed_s += 3 * compute_s
        end_s.append(device.computed_s)
    return end_s[2] - end_s[1]


NUM_BLOCKS = 20


@pytest.mark.parametrize("num_slots", [2, 3])
def test_copies_shorter_than_a_forward_pass_take_no_time(num_slots: int) -> None:
    assert step_s(NUM_BLOCKS, num_slots, 0.9, 1.0) == pytest.approx(NUM_BLOCKS * 4)


def test_without_a_second_slot_every_copy_adds_its_time() -> None:
    """The last block of the forward pass is the first of the backward pass, and so at the step's end."""
    assert step_s(NUM_BLOCKS, 1, 0.5, 1.0) == pytest.approx(NUM_BLOCKS * 4 + 2 * (NUM_BLOCKS - 1) * 0.5)


@pytest.mark.parametrize("copy_s", [1.5, 2.0, 2.9])
def test_between_forward_and_backward_only_the_forward_pass_waits_for_copies(copy_s: float) -> None:
    """Each pass copies all blocks except for the two that the pass before it left in the slots."""
    expected = NUM_BLOCKS * 4 + (NUM_BLOCKS - 2) * (copy_s - 1)
    assert step_s(NUM_BLOCKS, 2, copy_s, 1.0) == pytest.approx(expected, abs=copy_s)


@pytest.mark.parametrize("copy_s", [4.0, 10.0, 100.0])
def test_a_step_of_slow_copies_takes_the_time_of_its_copies(copy_s: float) -> None:
    copies = 2 * (NUM_BLOCKS - 2)
    assert step_s(NUM_BLOCKS, 2, copy_s, 1.0) == pytest.approx(copies * copy_s, rel=8 / copies)


@pytest.mark.parametrize("resident", [1, 3])
def test_blocks_that_stay_on_the_device_hide_longer_copies(resident: int) -> None:
    """Copies overlap with the computation of all blocks between two streamed ones."""
    copy_s, compute_s = 0.9 * (resident + 1), NUM_BLOCKS * 4
    assert step_s(NUM_BLOCKS, 2, copy_s, 1.0) > 1.1 * compute_s
    spread_s = step_s(NUM_BLOCKS, 2, copy_s, 1.0, resident=resident)
    assert spread_s == pytest.approx(compute_s * (resident + 1))
