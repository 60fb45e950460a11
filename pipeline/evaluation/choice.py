"""The choice of a step: the earliest one that is as good as the best and breaks no limit.

A step's quality is the mean over pictures of concept prompts of `learned` plus `obeys`, each divided by its
standard deviation over all pictures. Steps are compared picture by picture, with the same prompt and seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from pipeline.evaluation.intervals import CELL, Interval, interval
from pipeline.evaluation.numbers import Measured, StepNumbers, first_scorers

MAX_LOSS = 0.01
"""Maximum loss of quality of the chosen step, relative to the best."""

_TINY = 1e-12

MAX_REGRET = 0.25
"""Maximum quality, relative to the best, by which another step may be better at the end of its interval."""


@dataclass(frozen=True)
class Comparison:
    """Candidates with the same pictures, in the order in which they are preferred if they are equally good.

    Attributes:
        best: Candidate with the highest mean.
        gain: Its mean.
        losses: How much worse each candidate is than the best, picture by picture.
        chosen: First candidate that is as good as the best.
        rival: Candidate that may be better than the chosen one by most; None without another candidate.
        regret: How much better that one may be at the end of its interval, relative to `gain`.
    """

    best: int
    gain: float
    losses: Mapping[int, Interval]
    chosen: int
    rival: int | None
    regret: float

    @property
    def as_good(self) -> list[int]:
        """Candidates that are as good as the best."""
        return [candidate for candidate, loss in self.losses.items() if is_as_good(loss, self.gain)]


def compare(quality: Mapping[int, pl.DataFrame]) -> Comparison:
    """Compare candidates by a score of each picture, with the columns `CELL` and `score`."""
    means = {candidate: interval(scores).mean for candidate, scores in quality.items()}
    best = max(means, key=lambda candidate: means[candidate])
    gain = means[best]
    losses = {candidate: difference(quality[best], scores) for candidate, scores in quality.items()}
    chosen = next(candidate for candidate in quality if is_as_good(losses[candidate], gain))

    # Of all others, the candidate that may be better by most.
    regrets = {each: difference(quality[each], quality[chosen]) for each in quality if each != chosen}
    rival = max(regrets, key=lambda each: _high(regrets[each]), default=None)
    regret = 0.0 if rival is None else _high(regrets[rival]) / max(gain, _TINY)
    return Comparison(best, gain, losses, chosen, rival, regret)


@dataclass(frozen=True)
class Choice:
    """A chosen step, or the reason for which none is chosen.

    Attributes:
        step: Chosen step; None if it is not decided.
        why: Reason, in one or two sentences.
        best: Step with the highest quality among those that break no limit.
    """

    step: int | None
    why: str
    best: int | None = None

    @property
    def decided(self) -> bool:
        """Whether a step is chosen."""
        return self.step is not None


def choose(measured: Measured, limits: Mapping[str, float], *, strength: float | None = None) -> Choice:
    """Choose a step among those that were drawn at one strength.

    Args:
        measured: Numbers and scores of all steps.
        limits: Limit by number, such as drift, see `breaks_limit`. Numbers that are absent keep their limit.
        strength: Strength to compare at; None for 1.0, or the highest one if the steps were not drawn at 1.0.
    """
    if reason := measured.absent.get("learned"):
        return Choice(None, f"not decided: {reason}")
    if strength is None:
        strengths = {each.strength for each in measured.steps}
        strength = 1.0 if 1.0 in strengths else max(strengths)

    steps = {each.step: each for each in measured.steps if each.strength == strength}
    broken = {step: what for step, each in steps.items() if (what := broken_limits(each, limits))}
    allowed = [step for step in steps if step not in broken]
    if not allowed:
        step, what = next(iter(broken.items()))
        return Choice(None, f"not decided: every step breaks a limit; step {step} has {what}")

    quality = qualities(measured.scores.filter(pl.col("strength") == strength))
    return _choose_by_quality({step: quality[step] for step in allowed}, steps, broken)


def _choose_by_quality(
    quality: Mapping[int, pl.DataFrame], steps: Mapping[int, StepNumbers], broken: Mapping[int, str]
) -> Choice:
    compared = compare(quality)
    best, chosen = compared.best, compared.chosen
    learned = steps[best].learned
    if learned is None or learned.low is None or learned.low <= 0 or compared.gain <= 0:
        why = (
            f"not decided: no step draws the concept measurably better than the base model; step {best} "
            f"learned {learned}"
        )
        return Choice(None, why, best)

    if compared.regret > MAX_REGRET:
        why = (
            f"not decided: {learned.cells} pictures per step cannot tell step {chosen} from step "
            f"{compared.rival}, which may be better by {compared.regret:.0%}; draw more pictures"
        )
        return Choice(None, why, best)
    return Choice(chosen, _reason(chosen, best, steps, broken), best)


def _reason(chosen: int, best: int, steps: Mapping[int, StepNumbers], broken: Mapping[int, str]) -> str:
    learned = f"learned {steps[chosen].learned}"
    if chosen == best:
        why = f"step {chosen} is the best of {len(steps)}: {learned}"
    else:
        why = (
            f"step {chosen} is the earliest of {len(steps)} that is as good as the best, step {best}: "
            f"{learned} and {steps[best].learned}"
        )
    if broken:
        step, what = next(iter(broken.items()))
        breaks = "breaks" if len(broken) == 1 else f"and {len(broken) - 1} more break"
        why += f". Step {step} {breaks} a limit: {what}"
    return why


def breaks_limit(name: str, mean: float, low: float | None, limit: float) -> bool:
    """Return whether a number is above its limit: its mean, or for `copies` its complete interval.

    A limit of drift that needs certainty lets too many steps pass, see docs/evaluation.md. `copies` of a LoRA
    that copies nothing is 0 only on average: with few pictures, its mean may be above the limit.
    """
    return (low if name == "copies" and low is not None else mean) > limit


def broken_limits(step: StepNumbers, limits: Mapping[str, float]) -> str:
    """Return the numbers of a step that exceed a limit, in words; empty if it breaks none."""
    return ", ".join(
        f"{name} {number} above {limit:g}"
        for name, limit in limits.items()
        if (number := step[name]) is not None and breaks_limit(name, number.mean, number.low, limit)
    )


def qualities(scores: pl.DataFrame) -> dict[int, pl.DataFrame]:
    """Return the quality of each picture of the concept, by step."""
    numbers = first_scorers(scores).filter(pl.col("number").is_in(["learned", "obeys"]), role="concept")

    # Similarities of pictures and of texts have scales of their own. A number that never changes has none.
    spread = pl.col("score").std(ddof=0).over("number")
    scaled = numbers.with_columns(score=pl.when(spread > 0).then(pl.col("score") / spread).otherwise(0.0))
    quality = scaled.group_by("step", *CELL).agg(pl.col("score").sum())
    return {int(step): rows for (step,), rows in quality.group_by("step")}


def difference(left: pl.DataFrame, right: pl.DataFrame) -> Interval:
    """Return how much larger the scores of `left` are, picture by picture."""
    pairs = left.join(right, on=CELL, suffix="_right")
    return interval(pairs.with_columns(score=pl.col("score") - pl.col("score_right")))


def is_as_good(loss: Interval, gain: float) -> bool:
    """Return whether a candidate with this loss is as good as the best, which has this gain."""
    return loss.mean <= MAX_LOSS * max(gain, 0.0) and (loss.low is None or loss.low <= 0)


def _high(difference: Interval) -> float:
    return float("inf") if difference.high is None else difference.high
