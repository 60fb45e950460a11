"""Fitted lists against the ladder, on a population like the one that other rules were measured on."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.aspect_buckets.fit import FittedList, Request, fitted_lists
from pipeline.aspect_buckets.fit_cost import Dataset, Trade, placement_in, trade_of
from pipeline.images.geometry import Placement, ladder

LADDER = Placement((ladder(1024, 64, 3.0),))

LIMITS = {
    False: {7: (0.066, 0.98), 12: (0.037, 0.99), 20: (0.022, 0.99), 48: (0.0092, 0.98)},
    True: {7: (0.066, 0.98), 12: (0.038, 0.98), 20: (0.0228, 0.97), 48: (0.0098, 0.96)},
}
"""Mirrored or not, and at most so many sizes: most crop loss, least share in full batches. They are ahead of
what other trainers' rules were measured to do with at least as many sizes: 6.6% and 98% with 7, 4.5% and 98%
with 11, 3.0% and 94% with 19, 1.0% and 89% with 49."""


def population(seed: int, count: int = 500) -> Dataset:
    """Aspect ratio log-uniform from 0.4 to 2.5, 0.3 to 12 megapixels log-uniform, batches of 4."""
    random = np.random.default_rng(seed)
    aspect = np.exp(random.uniform(np.log(0.4), np.log(2.5), count))
    pixels = np.exp(random.uniform(np.log(0.3e6), np.log(12e6), count))
    height, width = np.sqrt(pixels / aspect).round(), np.sqrt(pixels * aspect).round()
    return Dataset(height.astype(np.int64), width.astype(np.int64), batch_size=4)


def fit(dataset: Dataset, *, mirrored: bool) -> dict[int, FittedList]:
    return fitted_lists(dataset, Request(1024, 8, 3.0, mirrored=mirrored), LIMITS[mirrored])


def assert_ahead(seeds: range, *, mirrored: bool) -> None:
    """Each seed's lists keep the limits, and from 12 sizes on none enlarges more images than the ladder."""
    for seed in seeds:
        dataset = population(seed)
        of_ladder = trade_of(LADDER, dataset)
        assert of_ladder.crop_loss <= 0.0315
        assert of_ladder.in_full_batches >= 0.92
        for number, found in fit(dataset, mirrored=mirrored).items():
            most_loss, least_full = LIMITS[mirrored][number]
            assert found.trade.crop_loss <= most_loss, (seed, number)
            assert found.trade.in_full_batches >= least_full, (seed, number)
            assert len(found.sizes) <= number
            assert all(0.94 <= s.height * s.width / 1024**2 <= 1.03 for s in found.sizes)
            assert found.trade.upscaled <= of_ladder.upscaled or number < 12, (seed, number)


@pytest.mark.parametrize("mirrored", [False, True])
def test_fitted_lists_are_ahead_of_the_ladder_on_two_populations(mirrored: bool) -> None:
    assert_ahead(range(3, 5), mirrored=mirrored)


@pytest.mark.slow
@pytest.mark.parametrize("mirrored", [False, True])
def test_fitted_lists_are_ahead_of_the_ladder_on_twenty_populations(mirrored: bool) -> None:
    assert_ahead(range(20), mirrored=mirrored)


def test_a_fitted_list_ages_slowly_in_crop_loss_and_a_little_in_full_batches() -> None:
    """Fit on 500, add 50: the figures of docs/buckets.md, on three of its populations."""
    for seed in range(3):
        before, after = _aged(seed)
        assert abs(after.crop_loss - before.crop_loss) <= 0.001
        assert before.in_full_batches - after.in_full_batches <= 0.06


def _aged(seed: int) -> tuple[Trade, Trade]:
    whole = population(seed, 550)
    first = Dataset(whole.height[:500], whole.width[:500], 4)
    placement = placement_in(fit(first, mirrored=True)[20].sizes)
    return trade_of(placement, first), trade_of(placement, whole)
