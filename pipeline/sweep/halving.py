"""Successive halving: at which steps variants are judged, how many go on, and what a budget allows.

All variants train to the first rung, a fraction of their steps. The best fraction `keep` of them goes on to
the next rung, which is 1 / `keep` times as far, and so on to the end (Jamieson and Talwalkar, Non-stochastic
Best Arm Identification and Hyperparameter Optimization, 2016, https://arxiv.org/abs/1502.07943). A variant
that goes on is resumed, so that no step is trained twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.recipe.sweep import HalvingSettings

# Products of decimal fractions, such as 0.1 * 30, may be slightly too large.
_TOLERANCE = 1e-9


def rungs(halving: HalvingSettings | None) -> tuple[float, ...]:
    """Return the fractions of its steps after which a variant is judged; the last one is 1."""
    if halving is None:
        return (1.0,)
    fractions: list[float] = []
    fraction = halving.first
    while fraction < 1 - _TOLERANCE:
        fractions.append(fraction)
        fraction /= halving.keep
    return (*fractions, 1.0)


def position(fraction: float, steps: int) -> int:
    """Return the number of steps after which a variant with `steps` steps is judged, at least 1."""
    return min(steps, max(1, math.ceil(fraction * steps - _TOLERANCE)))


def num_kept(keep: float, number: int) -> int:
    """Return how many of the judged variants go on, at least 1."""
    return max(1, math.ceil(keep * number - _TOLERANCE))


def affordable(costs: Sequence[float], *, left: float) -> int:
    """Return how many of the first costs fit into what is left of the budget."""
    number, total = 0, 0.0
    for cost in costs:
        total += cost
        if total > left + _TOLERANCE:
            break
        number += 1
    return number


def total_steps(halving: HalvingSettings | None, steps: Sequence[int]) -> int:
    """Return the number of steps of a sweep if nothing fails; `steps` are the steps of each variant.

    With variants of different lengths it is an upper limit: the longest ones may be the best.
    """
    lengths, done, total = sorted(steps, reverse=True), 0.0, 0
    for fraction in rungs(halving):
        total += sum(position(fraction, each) - (position(done, each) if done else 0) for each in lengths)
        done = fraction
        if halving is not None:
            lengths = lengths[: num_kept(halving.keep, len(lengths))]
    return total
