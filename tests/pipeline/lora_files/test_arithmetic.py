from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.lora_files.arithmetic import decompose, reduced, relative_error, summed
from pipeline.lora_files.layers import Layer


def layer(seed: int, *, rank: int = 3, scale: float = 0.5, kernel: tuple[int, ...] = ()) -> Layer:
    rng = np.random.default_rng(seed)
    down = rng.normal(size=(rank, 7, *kernel)).astype(np.float32)
    return Layer(down, rng.normal(size=(5, rank, *(1 for _ in kernel))).astype(np.float32), scale)


def dense(each: Layer) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    down, up = each.matrices
    return up @ down


@given(st.integers(0, 10_000), st.integers(1, 9), st.sampled_from([(), (3, 3)]), st.floats(-4, 4, width=32))
def test_the_decomposition_is_the_delta_weight(
    seed: int, rank: int, kernel: tuple[int, ...], scale: float
) -> None:
    each = layer(seed, rank=rank, scale=scale, kernel=kernel)
    singular = decompose(each)

    np.testing.assert_allclose((singular.left * singular.values) @ singular.right, dense(each), atol=1e-10)
    assert (np.diff(singular.values) <= 1e-12).all()
    assert singular.norm == pytest.approx(np.linalg.norm(dense(each)))


@given(st.integers(0, 10_000), st.floats(-2, 2, width=32), st.sampled_from([(), (3, 3)]))
def test_a_sum_has_the_sum_of_the_delta_weights(seed: int, weight: float, kernel: tuple[int, ...]) -> None:
    terms = [(weight, layer(seed, kernel=kernel)), (1.0, layer(seed + 1, rank=2, kernel=kernel))]
    result = summed(terms)

    expected = sum(number * dense(each) for number, each in terms)
    np.testing.assert_allclose(dense(result), expected, atol=1e-4)
    assert relative_error(terms, result) < 1e-6


def test_the_error_equals_the_difference_of_the_delta_weights() -> None:
    terms, other = [(0.3, layer(1)), (2.0, layer(2))], layer(3)
    total = 0.3 * dense(terms[0][1]) + 2.0 * dense(terms[1][1])

    expected = np.linalg.norm(total - dense(other)) / np.linalg.norm(total)
    assert relative_error(terms, other) == pytest.approx(expected)


def test_a_layer_of_zeros_keeps_one_rank() -> None:
    zero = Layer(np.zeros((4, 7), np.float32), np.zeros((5, 4), np.float32))

    smaller, energy = reduced(zero, max_rank=None, energy=0.99)
    assert (smaller.rank, energy) == (1, 1.0)
    assert not dense(smaller).any()


def test_a_small_enough_layer_is_unchanged() -> None:
    each = layer(4)
    assert reduced(each, max_rank=3, energy=None) == (each, 1.0)
