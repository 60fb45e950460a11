"""Successive halving: its rungs, its cost, and what a budget allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.recipe.sweep import HalvingSettings
from pipeline.sweep.halving import affordable, num_kept, position, rungs, total_steps

FRACTIONS = st.floats(0.02, 0.98)


def test_the_rungs_and_the_cost_of_twelve_variants() -> None:
    eighth = HalvingSettings(first=0.125, keep=0.5)
    assert rungs(eighth) == (0.125, 0.25, 0.5, 1.0)
    # 12 to 5 steps, 6 to 10, 3 to 20, 2 to 40.
    assert total_steps(eighth, [40] * 12) == 12 * 5 + 6 * 5 + 3 * 10 + 2 * 20
    assert total_steps(HalvingSettings(), [40] * 12) == 12 * 7 + 6 * 7 + 3 * 14 + 2 * 12
    assert (rungs(None), total_steps(None, [40, 20])) == ((1.0,), 60)


@given(FRACTIONS, FRACTIONS, st.integers(1, 5000))
def test_rungs_ascend_to_the_end_and_each_step_is_trained_once(first: float, keep: float, steps: int) -> None:
    fractions = rungs(HalvingSettings(first=first, keep=keep))
    assert list(fractions) == sorted(set(fractions))
    assert fractions[-1] == 1.0
    positions = [position(fraction, steps) for fraction in fractions]
    assert positions == sorted(positions)
    assert (positions[0] >= 1, positions[-1]) == (True, steps)
    assert total_steps(HalvingSettings(first=first, keep=keep), [steps]) == steps, "one variant is kept"


@given(FRACTIONS, st.integers(1, 100))
def test_at_least_one_variant_goes_on_and_never_more_than_there_are(keep: float, number: int) -> None:
    assert 1 <= num_kept(keep, number) <= number


def test_products_of_decimals_are_not_rounded_up() -> None:
    assert position(0.1, 30) == 3
    assert num_kept(0.1, 30) == 3


def test_a_budget_allows_the_first_costs_that_fit() -> None:
    assert affordable([4, 4, 4], left=8) == 2
    assert affordable([4, 4, 4], left=float("inf")) == 3
    assert affordable([4], left=-1) == 0
