"""The statistics of outliers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from pipeline.reporting.outliers import (
    OUTLIER_MIN_SPREAD,
    OUTLIER_MIN_VALUES,
    OUTLIER_THRESHOLD,
    outliers,
)


def test_only_values_many_times_the_median_are_outliers() -> None:
    values = np.random.default_rng(0).lognormal(0, 0.3, 1000)
    values[:3] = (100.0, 0.001, 30.0)
    result = outliers(values)
    assert np.flatnonzero(result.mask).tolist() == [0, 1, 2]
    assert result.judged
    assert result.low < result.median < result.high


def test_log_normal_values_have_almost_no_outliers() -> None:
    """A value is beyond 5 deviations with probability 5.7e-7; the seed is fixed."""
    assert outliers(np.random.default_rng(1).lognormal(5, 1, 100_000)).mask.sum() <= 2


def test_small_differences_among_equal_values_are_allowed() -> None:
    assert outliers([100.0] * 20 + [110.0, 160.0]).mask.sum() == 0
    assert outliers([100.0] * 20 + [170.0]).mask.sum() == 1


def test_a_value_at_the_threshold_is_no_outlier_and_the_next_one_is() -> None:
    """Half of the values are equal, so the spread is its lower bound and the limits are exact."""
    values = [1.0] * (OUTLIER_MIN_VALUES - 1)
    limit = math.exp(OUTLIER_THRESHOLD * OUTLIER_MIN_SPREAD)
    for value, is_outlier in ((limit, False), (limit * (1 + 1e-12), True), (1 / limit, False)):
        result = outliers([*values, value])
        assert result.judged, f"{OUTLIER_MIN_VALUES} values are enough"
        assert bool(result.mask[-1]) == is_outlier, f"{value!r} with the limits {result.low}, {result.high}"


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * 6 + [1e9]], ids=str)
def test_fewer_than_eight_values_have_no_outliers(values: list[float]) -> None:
    result = outliers(values)
    assert not result.judged
    assert not result.mask.any()
    assert outliers([1.0] * 8).judged, "eight values are enough"


def test_the_limits_are_five_deviations_around_the_median() -> None:
    """Deviations of 7 equal values have the lower bound 0.1, and those of these powers of 2 are 2 log(2)."""
    result = outliers([*[3.0] * 7, 4.0])
    assert (result.low, result.median) == (pytest.approx(3 * math.exp(-0.5)), 3.0)
    assert result.high == pytest.approx(3 * math.exp(0.5))

    powers = outliers([2.0**exponent for exponent in range(9)])
    spread = 2 * math.log(2) / norm.ppf(0.75)
    assert powers.median == 16.0
    assert (math.log(powers.low), math.log(powers.high)) == (
        pytest.approx(math.log(16) - 5 * spread),
        pytest.approx(math.log(16) + 5 * spread),
    )


def test_few_values_have_a_median_and_no_limits() -> None:
    few, none = outliers([1, 2, 9]), outliers([])
    assert (few.median, few.low, few.high, few.judged) == (2.0, 0.0, math.inf, False)
    assert few.mask.dtype == np.bool_
    assert few.mask.tolist() == [False] * 3
    assert math.isnan(none.median)


def test_values_of_any_type_are_computed_in_float64() -> None:
    values = np.arange(1, 20, dtype=np.float32)
    single, double = outliers(values), outliers(values.astype(np.float64))
    assert (single.low, single.high) == (double.low, double.high)


@given(st.lists(st.floats(1e-3, 1e6), min_size=8, max_size=50))
def test_order_does_not_matter_and_at_most_half_of_the_values_are_outliers(values: list[float]) -> None:
    result = outliers(values)
    assert result.mask.sum() * 2 <= len(values)
    assert outliers(values[::-1]).mask.tolist() == result.mask.tolist()[::-1]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_values_without_a_logarithm_are_errors(value: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        outliers([1.0] * 9 + [value])
