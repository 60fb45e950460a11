from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pipeline.vae_latents.worker.vae_batches import MAX_SHAPES, MIN_BATCHES, CudnnTuning


@pytest.fixture(autouse=True)
def restored_mode() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = before


def modes(tuning: CudnnTuning, shape: tuple[int, ...], num_batches: int) -> list[bool]:
    """Return cuDNN's mode in each of some batches of one shape."""
    found = []
    for _ in range(num_batches):
        tuning.before_batch(shape)
        found.append(torch.backends.cudnn.benchmark)
    return found


def test_algorithms_are_timed_for_shapes_of_many_batches_alone() -> None:
    tuning = CudnnTuning()
    assert modes(tuning, (4, 64, 64), MIN_BATCHES + 2) == [False] * MIN_BATCHES + [True] * 2
    assert modes(tuning, (1, 64, 64), 1) == [False]
    assert modes(tuning, (4, 64, 64), 1) == [True]


def test_the_number_of_timed_shapes_is_bounded() -> None:
    tuning = CudnnTuning()
    last = [modes(tuning, (1, 64, 8 * number), MIN_BATCHES + 1)[-1] for number in range(MAX_SHAPES + 3)]
    assert last == [True] * MAX_SHAPES + [False] * 3
    assert modes(tuning, (1, 64, 0), 1) == [True]
