"""`copies` tells simulated LoRAs that draw their training pictures from those that draw new ones."""

from __future__ import annotations

from demo.choosing.simulated_copies import SEEDS, num_flagged


def test_pictures_that_repeat_the_training_pictures_are_flagged_and_new_ones_are_not() -> None:
    assert num_flagged("world", memorised=True) == len(SEEDS)
    assert num_flagged("world", memorised=False) == 0
