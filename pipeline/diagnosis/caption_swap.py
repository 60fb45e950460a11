"""The caption swap: whether an image fits its own caption or another one, by the base model's loss.

With the loss L[d, c] of draw d (a noise level with its noise) under caption c, and c = 0 for the own one:

    gain[d, c] = (L[d, 0] - L[d, c]) / standard deviation of L[d, .]
    score      = max over c > 0 of the mean of gain[., c]

L is the training objective without weights. Its mean over draws is, up to a constant, a weighted bound on the
negative log-likelihood of the image given the caption: the diffusion classifier of Li et al. 2023,
https://arxiv.org/abs/2303.16203. As there, all captions share the noise of a draw, because the differences
then vary far less than the losses. A noise level decides how much captions matter, so each draw is divided by
the spread of its captions. The first draw has all captions; c are the few that fit best in it, and only they
have further draws. Decided captions get none.

The interval is Student's for the mean of the paired differences of the best caption. Few draws may agree by
chance, so their variance counts together with a usual one: the moderated t of Smyth 2004,
https://doi.org/10.2202/1544-6115.1027. The mean is below the lower end with a probability of 1%, and above
the upper end with 5%, apart from the choice of the best caption and of the number of draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Losses: TypeAlias = npt.NDArray[np.float32]

NUM_OTHERS = 32
"""Maximum number of other captions of an image."""

NUM_FINALISTS = 3
"""Number of other captions after the first draw: those that fit best in it."""

MIN_OTHERS = 3
"""Minimum number of other captions; fewer of them have no spread to compare a difference with."""

ROUNDS = (2, 3, 4, 6, 8)
"""Number of draws after each round; only undecided captions have a next one."""

MAX_DRAWS = ROUNDS[-1]

NOT_MEASURED = -1.0
"""Value in place of a loss that was not needed."""

_USUAL_DEVIATION = 0.75
"""Usual standard deviation of gains between draws: the root mean square of the demo's images."""

_USUAL_DRAWS = 4
"""Number of draws that the usual deviation counts as."""

# A false alarm costs a person's time, and is chosen among all images and captions.
_LOW_PROBABILITY, _HIGH_PROBABILITY = 0.01, 0.05


@dataclass(frozen=True)
class Verdict:
    """How well an image fits its caption.

    Attributes:
        score: Mean gain of the other caption that fits best; above 0 if it fits better than the own one.
        low: Lower end of its interval.
        high: Upper end of its interval.
        best: Index of that caption, from 1.
        passes: Number of losses that were measured.
    """

    score: float
    low: float
    high: float
    best: int
    passes: int

    @property
    def name(self) -> Literal["fits", "does not fit", "cannot tell"]:
        """Verdict in words."""
        if self.high < 0:
            return "fits"
        return "does not fit" if self.low > 0 else "cannot tell"


def positions() -> list[float]:
    """Return `MAX_DRAWS` positions between 0 and 1, of which each beginning covers the range evenly.

    They are the first numbers of van der Corput's sequence: 1/2, 1/4, 3/4, 1/8, 5/8, ...
    """
    return [int(f"{number:b}"[::-1], 2) / 2 ** number.bit_length() for number in range(1, MAX_DRAWS + 1)]


def measure(losses: Callable[[Sequence[int], Sequence[int]], Losses], num_captions: int) -> Losses:
    """Measure a caption until it is decided, and return all losses, (`MAX_DRAWS`, `num_captions`).

    `losses` returns the losses of some draws under some captions, with one row per draw.
    """
    measured = np.full((MAX_DRAWS, num_captions), NOT_MEASURED, dtype=np.float32)
    measured[:1] = losses([0], range(num_captions))
    finalists = [0, *sorted(1 + np.argsort(measured[0, 1:], kind="stable")[:NUM_FINALISTS])]
    start = 1
    for end in ROUNDS:
        measured[start:end, finalists] = losses(range(start, end), finalists)
        start = end
        if verdict_of(measured).name != "cannot tell":
            break
    return measured


def num_passes(num_captions: int, draws: int) -> int:
    """Return the number of losses that `measure` needs for a number of draws, at least 1."""
    return num_captions + (draws - 1) * min(num_captions, 1 + NUM_FINALISTS)


def verdict_of(measured: Losses) -> Verdict:
    """Return the verdict from the losses that `measure` returns."""
    from scipy.special import stdtrit

    losses = measured[measured[:, 0] != NOT_MEASURED].astype(np.float64)
    finalists = np.flatnonzero((losses != NOT_MEASURED).all(axis=0))
    compared = losses[:, finalists]
    spread = compared.std(axis=1, keepdims=True)
    # Equal losses have no spread, and their gains are 0 at any divisor.
    gains = (compared[:, :1] - compared[:, 1:]) / np.where(spread > 0, spread, 1.0)
    means = gains.mean(axis=0)
    best = int(np.argmax(means))
    squares = _USUAL_DRAWS * _USUAL_DEVIATION**2 + ((gains[:, best] - means[best]) ** 2).sum()
    freedom = _USUAL_DRAWS + len(gains) - 1
    error = np.sqrt(squares / freedom / len(gains))
    return Verdict(
        score=float(means[best]),
        low=float(means[best] - stdtrit(freedom, 1 - _LOW_PROBABILITY) * error),
        high=float(means[best] + stdtrit(freedom, 1 - _HIGH_PROBABILITY) * error),
        best=int(finalists[1 + best]),
        passes=int((losses != NOT_MEASURED).sum()),
    )
