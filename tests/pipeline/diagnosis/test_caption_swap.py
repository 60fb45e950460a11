from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from pipeline.diagnosis.caption_swap import (
    MAX_DRAWS,
    NOT_MEASURED,
    NUM_OTHERS,
    ROUNDS,
    Losses,
    measure,
    positions,
    verdict_of,
)


def losses_with(gains: Sequence[float], *, noise: float, seed: int = 0) -> Losses:
    """Return losses that differ by orders of magnitude between draws, with these gains of other captions."""
    random = np.random.default_rng(seed)
    levels = 10 ** random.uniform(-2, 0, size=(MAX_DRAWS, 1))
    own = np.array([0.0, *(-gain for gain in gains)])
    return (levels * (1 + own + noise * random.standard_normal((MAX_DRAWS, len(own))))).astype(np.float32)


def measured(losses: Losses) -> Losses:
    def part(draws: Sequence[int], captions: Sequence[int]) -> Losses:
        return losses[np.ix_(draws, captions)]

    return measure(part, losses.shape[1])


def test_each_beginning_of_the_positions_covers_the_range() -> None:
    assert positions()[:4] == [0.5, 0.25, 0.75, 0.125]
    assert len({*positions()}) == MAX_DRAWS


def test_a_clear_caption_is_decided_in_the_first_round() -> None:
    fits = verdict_of(measured(losses_with([-0.2] * NUM_OTHERS, noise=1e-3)))
    assert (fits.name, fits.passes) == ("fits", ROUNDS[0] * (1 + NUM_OTHERS))
    wrong = verdict_of(measured(losses_with([-0.2, 0.3] + [-0.2] * (NUM_OTHERS - 2), noise=1e-3)))
    assert (wrong.name, wrong.passes, wrong.best) == ("does not fit", ROUNDS[0] * (1 + NUM_OTHERS), 2)
    assert wrong.score > 0


def test_an_unclear_caption_is_measured_completely() -> None:
    unclear = measured(losses_with([0.0] * NUM_OTHERS, noise=0.05))
    assert not (unclear == NOT_MEASURED).any()
    verdict = verdict_of(unclear)
    assert (verdict.name, verdict.passes) == ("cannot tell", MAX_DRAWS * (1 + NUM_OTHERS))
    assert verdict.low < 0 < verdict.high


def test_the_interval_is_that_of_paired_differences() -> None:
    losses = losses_with([0.1, -0.1, -0.2, -0.1], noise=0.02)
    values = losses.astype(np.float64)
    gains = (values[:, 0] - values[:, 1]) / values.std(axis=1)
    expected = stats.ttest_1samp(gains, 0.0).confidence_interval(0.9)
    verdict = verdict_of(losses)
    assert (verdict.low, verdict.high) == pytest.approx((expected.low, expected.high))


def test_equal_losses_say_nothing() -> None:
    assert verdict_of(np.ones((MAX_DRAWS, 3), np.float32)).name == "cannot tell"
