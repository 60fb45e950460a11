"""The search finds the best list, compared with trying every list."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.aspect_buckets.fit import SizeConstraints, fitted_lists
from pipeline.aspect_buckets.fit_cost import WEIGHTS, Dataset, candidates
from pipeline.aspect_buckets.fit_search import best_lists
from pipeline.errors import BucketError
from pipeline.images.geometry import Size

CANDIDATES = candidates(256, 32, 2.5)
edges = st.integers(40, 900)
datasets = st.builds(
    lambda pairs, batch: Dataset(
        np.array([height for height, _ in pairs]), np.array([width for _, width in pairs]), batch
    ),
    st.lists(st.tuples(edges, edges), min_size=1, max_size=25),
    st.integers(1, 4),
)


def cost(sizes: tuple[Size, ...], dataset: Dataset) -> float:
    """Return the cost of a list, computed image by image."""
    logs = [np.log(size.width / size.height) for size in sizes]
    counts = [0] * len(sizes)
    total = 0.0
    for height, width in zip(dataset.height.tolist(), dataset.width.tolist(), strict=True):
        ratio = np.log(width) - np.log(height)
        distances = [abs(ratio - each) for each in logs]
        nearest = distances.index(min(distances))
        counts[nearest] += 1
        enlarged = max(sizes[nearest].height / height, sizes[nearest].width / width) > 1
        total += 1 - float(np.exp(-distances[nearest])) + WEIGHTS.upscaled * enlarged
    return total + WEIGHTS.partial * sum(count % dataset.batch_size for count in counts)


def symmetric(sizes: tuple[Size, ...]) -> bool:
    return {size.transposed for size in sizes} == set(sizes)


@settings(max_examples=15)
@given(datasets, st.booleans())
def test_no_list_of_the_same_length_costs_less(dataset: Dataset, mirrored: bool) -> None:
    max_sizes = 4
    best = best_lists(dataset, CANDIDATES, max_sizes, mirrored=mirrored)
    for number in range(1, max_sizes + 1):
        lists = [each for each in combinations(CANDIDATES, number) if not mirrored or symmetric(each)]
        if not lists:
            assert number not in best
            continue
        assert len(best[number]) == number
        assert symmetric(best[number]) or not mirrored
        # For an image halfway between two sizes, the two sums differ by rounding only.
        assert cost(best[number], dataset) <= min(cost(each, dataset) for each in lists) + 1e-9


def test_candidates_are_multiples_near_the_budget_with_their_transposed() -> None:
    for resolution, step in ((1024, 8), (512, 16), (768, 64)):
        sizes = candidates(resolution, step, 2.5)
        assert sizes == sorted(sizes, key=lambda size: size.width / size.height)
        assert {size.transposed for size in sizes} == set(sizes)
        assert len({size.width / size.height for size in sizes}) == len(sizes)
        for size in sizes:
            assert size.height % step == size.width % step == 0
            assert max(size) <= 2.5 * min(size)
            assert size.height * size.width <= 1.03 * resolution**2
    small = [size for size in candidates(1024, 8, 2.5) if size.height * size.width < 0.94 * 1024**2]
    assert small == []


def test_large_batches_get_fewer_candidates_and_too_large_batches_are_an_error() -> None:
    random = np.random.default_rng(0)
    height, width = random.integers(300, 3000, (2, 200))
    constraints = SizeConstraints(1024, 8, 3.0, mirrored=True)
    assert 6 in fitted_lists(Dataset(height, width, 24), constraints, [6])
    with pytest.raises(BucketError, match="search for a free list with --free"):
        fitted_lists(Dataset(height, width, 6000), constraints, [6])
    with pytest.raises(BucketError, match="at least one image"):
        fitted_lists(Dataset(height[:0], width[:0], 4), constraints, [6])
