"""On simulated runs, the choice is nearly as good as the best step, and better than the last one."""

from __future__ import annotations

import numpy as np
import polars as pl

from pipeline.evaluation.choice import choose
from pipeline.evaluation.numbers import SCORES, Measured, measured

CURVES = {
    "healthy": [0.05, 0.2, 0.45, 0.7, 0.9, 1.0, 1.0, 0.95],
    "overtrained": [0.4, 0.8, 1.0, 0.95, 0.8, 0.65, 0.5, 0.4],
    "too short": [0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0],
}
"""Mean gain of eight steps, relative to the best."""

NUM_RUNS = 20


def _simulate(levels: np.ndarray, random: np.random.Generator, *, num_prompts: int, noise: float) -> Measured:
    """Return the scores of pictures with four seeds.

    Prompts, seeds and single pictures differ by factors that all steps share, and each step adds noise.
    """
    shape = (num_prompts, 4)
    factors = 1 + random.normal(0, 0.3, (num_prompts, 1)) + random.normal(0, 0.1, (1, 4))
    factors = factors + random.normal(0, 0.3, shape)
    scores = levels[:, None, None] * factors + random.normal(0, noise, (len(levels), *shape))
    step, prompt, seed = (each.ravel() for each in np.indices(scores.shape))
    constants = {"strength": 1.0, "role": "concept", "concept": "zorp", "scorer": "any", "picture": ""}
    table = pl.DataFrame(
        {"step": step + 1, "prompt": prompt.astype(str), "seed": seed, "score": scores.ravel()}
    )
    table = table.with_columns(**{name: pl.lit(value) for name, value in constants.items()})
    return measured(table.with_columns(number=pl.lit("learned")).select(*SCORES))


def _ratios(num_prompts: int, noise: float) -> tuple[list[float], list[float]]:
    """Return the gains of the chosen steps and of the last steps, relative to the best step of their run."""
    random = np.random.default_rng(0)
    chosen: list[float] = []
    last: list[float] = []
    for curve in CURVES.values():
        for _ in range(NUM_RUNS):
            levels = np.clip(np.array(curve) + random.normal(0, 0.05, len(curve)), 0.02, None)
            choice = choose(_simulate(levels, random, num_prompts=num_prompts, noise=noise), {})
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
