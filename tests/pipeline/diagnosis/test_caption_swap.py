from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from pipeline.diagnosis.caption_swap import (
    GRADIENT_PASSES,
    MAX_DRAWS,
    NOT_MEASURED,
    NUM_CHOSEN_FINALISTS,
    NUM_FINALISTS,
    ROUNDS,
    Losses,
    measure,
    num_passes,
    positions,
    verdict_of,
)
from pipeline.recipe.diagnosis import NUM_OTHERS


def losses_with(gains: Sequence[float], *, noise: float, seed: int = 0) -> Losses:
    """Return losses that differ by orders of magnitude between draws, with these gains of other captions."""
    random = np.random.default_rng(seed)
    levels = 10 ** random.uniform(-2, 0, size=(MAX_DRAWS, 1))
    own = np.array([0.0, *(-gain for gain in gains)])
    return (levels * (1 + own + noise * random.standard_normal((MAX_DRAWS, len(own))))).astype(np.float32)


def measured(losses: Losses, *, num_others: int = NUM_OTHERS) -> Losses:
    """Measure captions; their changes to first order are those of the first draw."""

    def part(draws: Sequence[int], captions: Sequence[int]) -> Losses:
        return losses[np.ix_(draws, captions)]

    return measure(part, lambda: losses[0] - losses[0, 0], losses.shape[1], num_others)


def test_each_beginning_of_the_positions_covers_the_range() -> None:
    assert positions()[:4] == [0.5, 0.25, 0.75, 0.125]
    assert len({*positions()}) == MAX_DRAWS


def test_a_clear_caption_is_decided_in_the_first_round() -> None:
    fits = verdict_of(measured(losses_with([-0.2] * NUM_OTHERS, noise=1e-3)))
    assert (fits.name, fits.passes) == ("fits", num_passes(1 + NUM_OTHERS, ROUNDS[0], NUM_OTHERS))
    wrong = verdict_of(measured(losses_with([-0.2, 1.0] + [-0.2] * (NUM_OTHERS - 2), noise=1e-3)))
    assert (wrong.name, wrong.passes, wrong.best) == ("does not fit", fits.passes, 2)
    assert wrong.score > 0


def test_an_unclear_caption_is_measured_with_those_that_fit_best_in_the_first_draw() -> None:
    losses = losses_with([0.0] * NUM_OTHERS, noise=0.05, seed=1)
    unclear = measured(losses)
    best = {0, *(1 + np.argsort(losses[0, 1:])[:NUM_FINALISTS])}
    assert (unclear[0] == losses[0]).all()
    for caption in range(1 + NUM_OTHERS):
        expected = losses[1:, caption] if caption in best else NOT_MEASURED
        assert (unclear[1:, caption] == expected).all()
    verdict = verdict_of(unclear)
    assert (verdict.name, verdict.passes) == ("cannot tell", (unclear != NOT_MEASURED).sum())
    assert verdict.passes == num_passes(1 + NUM_OTHERS, MAX_DRAWS, NUM_OTHERS)
    assert verdict.best in best
    assert verdict.low < 0 < verdict.high


def test_fewer_captions_are_those_that_fit_best_by_the_gradient() -> None:
    losses = losses_with([0.0] * NUM_OTHERS, noise=0.05, seed=1)
    unclear = measured(losses, num_others=8)
    order = 1 + np.argsort(losses[0, 1:])
    first, finalists = {0, *order[:8]}, {0, *order[:NUM_CHOSEN_FINALISTS]}
    assert {*np.flatnonzero(unclear[0] != NOT_MEASURED)} == first
    assert {*np.flatnonzero(unclear[-1] != NOT_MEASURED)} == finalists
    verdict = verdict_of(unclear)
    assert verdict.best in finalists
    assert verdict.passes == (unclear != NOT_MEASURED).sum() + GRADIENT_PASSES
    assert verdict.passes == num_passes(1 + NUM_OTHERS, MAX_DRAWS, 8)


def test_a_gradient_is_computed_only_if_captions_are_chosen() -> None:
    losses = losses_with([-0.2] * 8, noise=1e-3)

    def changes() -> Losses:
        raise AssertionError

    all_measured = measure(lambda draws, captions: losses[np.ix_(draws, captions)], changes, 9, 8)
    assert verdict_of(all_measured).passes == num_passes(9, ROUNDS[0], 8) == num_passes(9, ROUNDS[0], 32)


def test_the_interval_is_that_of_paired_differences_with_four_usual_draws() -> None:
    losses = losses_with([0.1, -0.1, -0.2, -0.1], noise=0.02)
    values = losses.astype(np.float64)
    gains = (values[:, 0] - values[:, 1]) / values.std(axis=1)
    variance = (4 * 0.75**2 + (len(gains) - 1) * gains.var(ddof=1)) / (len(gains) + 3)
    mean = stats.t(len(gains) + 3, loc=gains.mean(), scale=(variance / len(gains)) ** 0.5)
    verdict = verdict_of(losses)
    assert (verdict.low, verdict.high) == pytest.approx((mean.ppf(0.01), mean.ppf(0.95)))


def test_two_draws_that_agree_by_chance_decide_nothing() -> None:
    losses = np.full((MAX_DRAWS, 4), NOT_MEASURED, dtype=np.float32)
    # Gains of 0.77 and 0.74: Student's interval of these two draws alone is 0.68 to 0.83.
    losses[:2] = [[1.0, 0.75, 1.5, 1.5], [1.0, 0.76, 1.5, 1.5]]
    verdict = verdict_of(losses)
    assert verdict.score > 0.5
    assert verdict.name == "cannot tell"


def test_equal_losses_say_nothing() -> None:
    assert verdict_of(np.ones((MAX_DRAWS, 3), np.float32)).name == "cannot tell"
