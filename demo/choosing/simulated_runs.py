"""Simulated runs, whose best step is known: how often is a choice right, and which limit of drift is best?

python -m demo.choosing.simulated_runs    # print the table of the limits of drift in docs/evaluation.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from demo.world import Array
from pipeline.evaluation.choice import Choice, choose
from pipeline.evaluation.intervals import Interval
from pipeline.evaluation.numbers import SCORES, Measured, measured

CURVES = {
    "healthy": [0.05, 0.2, 0.45, 0.7, 0.9, 1.0, 1.0, 0.95],
    "overtrained": [0.4, 0.8, 1.0, 0.95, 0.8, 0.65, 0.5, 0.4],
    "too short": [0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0],
}
"""Mean gain of eight steps, relative to the best."""

NUM_RUNS = 20
"""Simulated runs per curve."""

LIMIT = 0.15

LIMIT_RULES: Mapping[str, Callable[[Interval], bool]] = {
    "the mean is above the limit": lambda drift: drift.mean > LIMIT,
    "the interval is completely above": lambda drift: drift.low is not None and drift.low > LIMIT,
    "the upper end is above": lambda drift: drift.high is not None and drift.high > LIMIT,
}
"""Rules that exclude a step. `choose` has the first one."""

DRIFT_NOISE = (0.05, 0.15, 0.3)
"""Standard deviations of one picture's drift."""


@dataclass
class LimitResult:
    """Outcomes of one rule.

    Attributes:
        above: Number of chosen steps with a true drift above the limit.
        good: Number of chosen steps below it with at least 0.97 of the best such step's gain.
    """

    decided: int = 0
    above: int = 0
    good: int = 0


def simulated_levels(random: np.random.Generator) -> Iterator[Array]:
    """Yield the gains of the steps of each run: `NUM_RUNS` for each curve."""
    for curve in CURVES.values():
        for _ in range(NUM_RUNS):
            yield np.clip(np.array(curve) + random.normal(0, 0.05, len(curve)), 0.02, None)


def simulated_scores(
    levels: Array, random: np.random.Generator, *, num_prompts: int, noise: float, number: str = "learned"
) -> pl.DataFrame:
    """Return the scores of pictures with four seeds, with the columns `SCORES`.

    Prompts, seeds and single pictures differ by factors that all steps share, and each step adds noise.

    Args:
        levels: Mean score of each step; steps are numbered from 1.
        random: Source of randomness.
        num_prompts: Number of prompts.
        noise: Standard deviation of one picture's score between steps.
        number: `learned` of prompts of the concept, or `drift` of base prompts.
    """
    shape = (num_prompts, 4)
    factors = 1 + random.normal(0, 0.3, (num_prompts, 1)) + random.normal(0, 0.1, (1, 4))
    factors = factors + random.normal(0, 0.3, shape)
    scores = levels[:, None, None] * factors + random.normal(0, noise, (len(levels), *shape))
    step, prompt, seed = (each.ravel() for each in np.indices(scores.shape))
    table = pl.DataFrame(
        {"step": step + 1, "prompt": prompt.astype(str), "seed": seed, "score": scores.ravel()}
    )
    constants: dict[str, object] = {
        "strength": 1.0,
        "role": "base" if number == "drift" else "concept",
        "concept": "" if number == "drift" else "zorp",
        "scorer": "any",
        "number": number,
        "picture": "",
    }
    return table.with_columns(**{name: pl.lit(value) for name, value in constants.items()}).select(*SCORES)


def limit_results(noise: float) -> dict[str, LimitResult]:
    """Return the outcomes of `LIMIT_RULES` on the same runs; drifts grow to between 0.05 and 0.4."""
    random = np.random.default_rng(1)
    results = {name: LimitResult() for name in LIMIT_RULES}
    for levels in simulated_levels(random):
        last = random.uniform(0.05, 0.4)
        drifts = np.linspace(last / len(levels), last, len(levels)) + random.normal(0, 0.01, len(levels))
        drifts = np.clip(drifts, 0, None)
        scores = [
            simulated_scores(levels, random, num_prompts=8, noise=0.25),
            simulated_scores(drifts, random, num_prompts=6, noise=noise, number="drift"),
        ]
        run = measured(pl.concat(scores))
        for name, excludes in LIMIT_RULES.items():
            step = _chosen(run, excludes).step
            if step is None:
                continue
            is_kept = drifts <= LIMIT
            result = results[name]
            result.decided += 1
            result.above += int(not is_kept[step - 1])
            if is_kept[step - 1]:
                result.good += int(levels[step - 1] >= 0.97 * levels[is_kept].max())
    return results


def _chosen(run: Measured, excludes: Callable[[Interval], bool]) -> Choice:
    allowed = [each.step for each in run.steps if each.drift is not None and not excludes(each.drift)]
    if not allowed:
        return Choice(None, "every step breaks the limit")
    return choose(measured(run.scores.filter(pl.col("step").is_in(allowed))), {})


def main() -> None:
    """Print the table of the limits."""
    print("| excluded if | noise | decided | chosen step above the limit | good |\n|---|---|---|---|---|")
    for noise in DRIFT_NOISE:
        for name, each in limit_results(noise).items():
            print(f"| {name} | {noise:g} | {each.decided} | {each.above} | {each.good} |")


if __name__ == "__main__":
    main()
