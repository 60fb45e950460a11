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

If fewer captions are to be measured than there are, the first draw has those that lower its loss most to
first order, by the gradient at the embedding of the own caption:

    change[c] = gradient . (embedding[c] - embedding[0])

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

NUM_FINALISTS = 3
"""Number of other captions after the first draw: those that fit best in it."""

# With a gradient at the mean of the embeddings, a third one cost two epochs more and found no more.
NUM_CHOSEN_FINALISTS = 2
"""The same number if the gradient chose the captions of the first draw."""

GRADIENT_PASSES = 3
"""Forward passes that take as long as a gradient, whose backward pass takes about two."""

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
        passes: Number of losses that were measured, and the passes of the gradient.
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


def measure(
    losses: Callable[[Sequence[int], Sequence[int]], Losses],
    changes: Callable[[], Losses],
    num_captions: int,
    num_others: int,
) -> Losses:
    """Measure a caption until it is decided, and return all losses, (`MAX_DRAWS`, `num_captions`).

    Args:
        losses: Returns the losses of some draws under some captions, with one row per draw.
        changes: Returns the change of the first draw's loss under each caption to first order,
            (`num_captions`,).
        num_captions: Number of captions, of which the first one is the own.
        num_others: Maximum number of other captions in the first draw.
    """
    measured = np.full((MAX_DRAWS, num_captions), NOT_MEASURED, dtype=np.float32)
    others, num_finalists = np.arange(1, num_captions), NUM_FINALISTS
    if len(others) > num_others:
        others = np.sort(1 + np.argsort(changes()[1:], kind="stable")[:num_others])
        num_finalists = NUM_CHOSEN_FINALISTS
    first: list[int] = [0, *others.tolist()]
    measured[0, first] = losses([0], first)[0]
    finalists = [0, *sorted(others[np.argsort(measured[0, others], kind="stable")[:num_finalists]])]
    start = 1
    for end in ROUNDS:
        measured[start:end, finalists] = losses(range(start, end), finalists)
        start = end
        if verdict_of(measured).name != "cannot tell":
            break
    return measured


def num_passes(num_captions: int, draws: int, num_others: int) -> int:
    """Return the number of passes that `measure` needs for a number of draws, at least 1."""
    if num_captions - 1 > num_others:
        return GRADIENT_PASSES + 1 + num_others + (draws - 1) * (1 + NUM_CHOSEN_FINALISTS)
    return num_captions + (draws - 1) * min(num_captions, 1 + NUM_FINALISTS)


def verdict_of(measured: Losses) -> Verdict:
    """Return the verdict from the losses that `measure` returns."""
    from scipy.special import stdtrit

    losses = measured[measured[:, 0] != NOT_MEASURED].astype(np.float64)
    was_chosen = bool((losses[0] == NOT_MEASURED).any())
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
        passes=int((losses != NOT_MEASURED).sum()) + was_chosen * GRADIENT_PASSES,
    )
