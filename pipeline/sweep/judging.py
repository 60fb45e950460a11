"""The comparison of variants that were judged at the same fraction of their steps, and the winner.

The score of a variant is a mean over cells: pictures of the concept, or held-out images, each with the seeds
of the training. Variants are compared cell by cell, so what all of them share cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from pipeline.errors import SweepError, counted
from pipeline.evaluation.choice import MAX_REGRET, Comparison, compare, difference
from pipeline.evaluation.intervals import CELL, Interval, interval

Cost = tuple[int, int, int]
"""Steps, size of the LoRA in bytes and number of a variant. The smallest is the cheapest."""


@dataclass(frozen=True)
class Standing:
    """A variant among those that were judged with it.

    Attributes:
        behind: How much higher the best score is, cell by cell.
        broken: Limits of the evaluation that the variant exceeds, in words; empty if it exceeds none.
    """

    score: Interval
    behind: Interval
    broken: str = ""


@dataclass(frozen=True)
class Judged:
    """The variants of a rung, compared.

    Attributes:
        standings: By variant, the best first. Variants that exceed a limit follow all others.
        comparison: The variants that exceed no limit, or all of them if each exceeds one.
    """

    standings: Mapping[int, Standing]
    comparison: Comparison


@dataclass(frozen=True)
class Decision:
    """The winner of a sweep.

    Attributes:
        winner: Cheapest variant that is as good as the best; None if none is better than the base model.
        decided: Whether no other variant may be much better.
        why: Reason, in one or two sentences.
        tied: Variants that are as good as the best, if there are several.
    """

    winner: int | None
    decided: bool
    why: str
    tied: tuple[int, ...] = ()


def judge(
    quality: Mapping[int, pl.DataFrame], costs: Mapping[int, Cost], broken: Mapping[int, str]
) -> Judged:
    """Compare variants by the cells that all of them have, with the columns `CELL` and `score`.

    Raises:
        SweepError: They have no cell in common.
    """
    quality = _common(quality)
    allowed = [variant for variant in quality if variant not in broken] or list(quality)
    by_cost = sorted(allowed, key=lambda variant: costs[variant])
    compared = compare({variant: quality[variant] for variant in by_cost})
    best = quality[compared.best]
    standings = {
        variant: Standing(interval(cells), difference(best, cells), broken.get(variant, ""))
        for variant, cells in quality.items()
    }
    order = sorted(standings, key=lambda each: (each in broken, -standings[each].score.mean, costs[each]))
    return Judged({variant: standings[variant] for variant in order}, compared)


def _common(quality: Mapping[int, pl.DataFrame]) -> dict[int, pl.DataFrame]:
    shared = next(iter(quality.values())).select(CELL)
    for cells in quality.values():
        shared = shared.join(cells, on=CELL, how="semi")
    if shared.is_empty():
        raise SweepError(
            "the variants have no held-out image and no prompt in common",
            where="sweep",
            fix="do not vary what decides the holdout, or write the prompts into evaluation.prompts",
        )
    return {variant: cells.join(shared, on=CELL, how="semi") for variant, cells in quality.items()}


def decide(judged: Judged, names: Mapping[int, str], *, num_variants: int) -> Decision:
    """Return the winner among the variants of the last rung; `names` are their texts."""
    compared, standings = judged.comparison, judged.standings
    best, chosen = compared.best, compared.chosen
    score = standings[best].score
    if standings[best].broken:
        why = f"not decided: every variant exceeds a limit; {names[best]} has {standings[best].broken}"
        return Decision(None, False, why)
    if score.low is None or score.low <= 0:
        why = f"not decided: no variant is measurably better than the base model; {names[best]} has {score}"
        return Decision(None, False, why)

    tied = tuple(sorted(compared.as_good)) if len(compared.as_good) > 1 else ()
    shown = counted(num_variants, "variant")
    if not tied:
        why = f"{names[chosen]} is the best of {shown}: {score}"
    elif chosen == best:
        why = f"{names[chosen]} is the best of {shown}, and the cheapest of the tied {_listed(tied)}: {score}"
    else:
        why = (
            f"{names[chosen]} is the cheapest of the tied variants {_listed(tied)} of {shown}: "
            f"{standings[chosen].score}, and {score} for the best, variant {best}"
        )
    if compared.regret > MAX_REGRET:
        why = (
            f"not decided: {score.cells} scores per variant cannot tell {names[chosen]} from variant "
            f"{compared.rival}, which may be better by {compared.regret:.0%}; raise evaluation.pictures or "
            "sweep.seeds"
        )
    return Decision(chosen, compared.regret <= MAX_REGRET, why, tied)


def _listed(variants: Sequence[int]) -> str:
    *head, last = map(str, variants)
    return f"{', '.join(head)} and {last}" if head else last
