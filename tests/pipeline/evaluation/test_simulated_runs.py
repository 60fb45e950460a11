"""On simulated runs, the choice is nearly as good as the best step, and better than the last one."""

from __future__ import annotations

import numpy as np

from demo.choosing.simulated_runs import LIMIT_RULES, limit_results, simulated_levels, simulated_scores
from pipeline.evaluation.choice import choose
from pipeline.evaluation.numbers import measured


def _ratios(num_prompts: int, noise: float) -> tuple[list[float], list[float]]:
    """Return the gains of the chosen steps and of the last steps, relative to the best step of their run."""
    random = np.random.default_rng(0)
    chosen: list[float] = []
    last: list[float] = []
    for levels in simulated_levels(random):
        scores = simulated_scores(levels, random, num_prompts=num_prompts, noise=noise)
        choice = choose(measured(scores), {})
        last.append(levels[-1] / levels.max())
        if choice.step is not None:
            chosen.append(levels[choice.step - 1] / levels.max())
    return chosen, last


def test_the_chosen_step_is_nearly_as_good_as_the_best() -> None:
    chosen, last = _ratios(8, 0.25)
    assert len(chosen) >= 50
    assert sum(ratio >= 0.97 for ratio in chosen) >= 0.8 * len(chosen)
    assert min(chosen) >= 0.85
    assert np.mean(chosen) >= 0.98
    assert sum(ratio >= 0.97 for ratio in last) <= 30


def test_few_pictures_with_much_noise_decide_seldom_instead_of_choosing_badly() -> None:
    chosen, _ = _ratios(4, 0.5)
    assert len(chosen) <= 15


def test_a_limit_for_the_mean_protects_more_than_one_for_the_interval_and_chooses_more_good_steps() -> None:
    results = limit_results(0.05)
    mean, interval, upper_end = (results[name] for name in LIMIT_RULES)
    assert mean.decided >= 50
    assert mean.above <= 5 < interval.above
    assert mean.good > max(interval.good, upper_end.good)
