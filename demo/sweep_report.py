"""Figures of the sweeps in demo/results/sweep.jsonl and sweep_rules.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, variance
from typing import Any

import numpy as np

from pipeline.evaluation.intervals import grid_interval
from pipeline.recipe.sweep import HalvingSettings
from pipeline.sweep.halving import num_kept, position, rungs

Line = dict[str, Any]

MAX_BEHIND = 0.03
"""Largest difference of a good winner to the best variant, as a fraction of right pictures."""

MAX_FACTOR = 3.0
"""Largest ratio of a good proposal of a rate to the rate of the best variant, in either direction."""

_REJUDGED = HalvingSettings(first=0.2, keep=0.5)
"""Halving at steps at which the first study has losses: 8, 16, 32 and 40."""

_FACTOR = (1.96 + 0.84) ** 2
"""(z for a two-sided 95% interval + z for a power of 80%) squared."""


def read_lines(file: Path) -> list[Line]:
    """Return the lines of the results, by seed; none without the file."""
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.is_file() else []
    return sorted(lines, key=lambda line: line["seed"])


def report(lines: Sequence[Line]) -> str:
    """Return the figures as text."""
    if not lines:
        return "no seeds yet"
    names = _names(lines[0]["grid"])
    behind = [_behind(line, "winner") for line in lines]
    shares = [line["steps"] / line["steps_of_all"] for line in lines]
    shown = ["seed  steps  winner               true   best                 true   behind (standard error)"]
    for line, share, lost in zip(lines, shares, behind, strict=True):
        true, winner = truths(line), line["winner"]
        best = true.index(max(true))
        won = "not decided" if winner is None else names[winner - 1]
        score = "    " if winner is None else f"{true[winner - 1]:.2f}"
        head = f"{line['seed']:>4}  {share:>5.0%}  {won:<19}  {score}"
        shown.append(f"{head}   {names[best]:<19}  {true[best]:.2f}   {lost:.2f} ({_error(line):.2f})")
    num_good = sum(lost <= MAX_BEHIND for lost in behind)
    by_loss = sum(_behind(line, "winner_by_loss") <= MAX_BEHIND for line in lines)
    survived = sum(_behind_finalists(line) <= MAX_BEHIND for line in lines)
    launches = {name for line in lines for name in line["launches"]}
    encoders = sorted(name for name in launches if "vae" in name or "text" in name)
    return "\n".join(
        [
            *shown,
            "",
            f"seeds in which a variant is within {MAX_BEHIND} of the best of all twelve:",
            f"  the winner: {num_good} of {len(lines)}",
            f"  a winner by the loss on held-out images: {by_loss} of {len(lines)}",
            f"  one of the variants that reach the end: {survived} of {len(lines)}",
            f"launches that encoded images or texts during the sweeps: {len(encoders)}",
            "",
            *_unpaired(lines, names),
        ]
    )


def rules_report(lines: Sequence[Line], first_study: Sequence[Line]) -> str:
    """Return a table of rules of halving, of the complete grids, and of the first study, as text.

    Args:
        lines: Lines of demo/results/sweep_rules.jsonl.
        first_study: Lines of demo/results/sweep.jsonl, which has other seeds.
    """
    if not lines:
        return "no seeds yet"
    found = {
        name: [(line, line["rules"][name]["winner"], line["rules"][name]["steps"]) for line in lines]
        for name in lines[0]["rules"]
    }
    for judge in ("losses", "pictures"):
        found[f"complete grid, {judge}"] = [
            (line, line[f"complete_by_{judge}"], line["steps_of_all"]) for line in lines
        ]
    shown = [f"{'rule':<38}  steps  good winner           behind: mean, most", "fresh seeds"]
    shown += [_found(name, winners) for name, winners in found.items()]
    rules = list(lines[0]["rules"])
    fewer = [
        _behind({**line, **line["rules"][rules[0]]}, "winner")
        - _behind({**line, **line["rules"][rules[-1]]}, "winner")
        for line in lines
    ]
    shown += [f"  behind with {rules[0]}, minus with {rules[-1]}: {grid_interval(np.array([fewer]))}"]
    shown += ["the ten seeds of the first study"]
    shown += [
        _found(name, [(line, line[winner], line[steps]) for line in first_study])
        for name, winner, steps in (
            ("losses, a third goes on", "winner", "steps"),
            ("complete grid, losses", "complete_winner_by_loss", "steps_of_all"),
        )
    ]
    shown += ["", "seeds in which a variant that reached the end is good:"]
    for name in lines[0]["rules"]:
        num_good = sum(_lost(line, line["rules"][name]["reached"]) <= MAX_BEHIND for line in lines)
        shown.append(f"  {name:<36}  {num_good} of {len(lines)}")
    for name, expects in (("losses", False), ("expected losses", True)):
        reached = [reached_by_losses(line, _REJUDGED, expects=expects) for line in first_study]
        good = [_lost(line, each) <= MAX_BEHIND for line, each in zip(first_study, reached, strict=True)]
        shown.append(f"  {name + ', first study, 43% of steps':<36}  {sum(good)} of {len(good)}")
    names = _names(lines[0]["grid"])
    shown += ["", f"seed  best{'':15}  true   behind, by rule in the order of the table"]
    for line in lines:
        true = truths(line)
        best = true.index(max(true))
        winners = [winner for of in found.values() for each, winner, _ in of if each is line]
        lost = "  ".join(f"{_lost(line, [] if each is None else [each]):.2f}" for each in winners)
        shown.append(f"{line['seed']:>4}  {names[best]:<19}  {true[best]:.2f}   {lost}")
    return "\n".join(shown)


def _found(name: str, winners: Sequence[tuple[Line, int | None, int]]) -> str:
    """Return a row of the table; `winners` are the winner and the steps of each line."""
    behind = [_lost(line, [] if winner is None else [winner]) for line, winner, _ in winners]
    num_good = sum(lost <= MAX_BEHIND for lost in behind)
    low, high = share_interval(num_good, len(behind))
    share = mean(steps / line["steps_of_all"] for line, _, steps in winners)
    good = f"{num_good} of {len(behind)} ({low:.0%} to {high:.0%})"
    return f"  {name:<36}  {share:>4.0%}  {good:<20}  {mean(behind):.2f}, {max(behind):.2f}"


def reached_by_losses(line: Line, halving: HalvingSettings, *, expects: bool) -> list[int]:
    """Return the variants that would reach the end, by the stored losses of a grid.

    Args:
        line: Line of demo/results/sweep.jsonl.
        halving: Its rungs must be steps with losses.
        expects: Whether losses are extrapolated to the next rung.
    """
    falls = [np.mean(np.array(losses[0]) - np.array(losses), axis=1) for losses in line["losses"]]
    steps = line["steps_of_all"] // len(falls)
    alive, before = list(range(1, len(falls) + 1)), 0
    for fraction, later in pairwise(rungs(halving)):
        now, following = (-(-position(each, steps) // line["save_every"]) for each in (fraction, later))
        ahead = (following - now) / (now - before) if expects else 0.0
        expected = [fall[now] + ahead * (fall[now] - fall[before]) for fall in falls]
        best = sorted((-expected[each - 1], each) for each in alive)
        alive = sorted(each for _, each in best[: num_kept(halving.keep, len(alive))])
        before = now
    return alive


def share_interval(number: int, of: int) -> tuple[float, float]:
    """Return the 95% interval of a fraction (Wilson, 1927).

    https://en.wikipedia.org/wiki/Binomial_proportion_confidence_interval#Wilson_score_interval
    """
    z, share = 1.96, number / of
    middle = (share + z**2 / (2 * of)) / (1 + z**2 / of)
    half = z / (1 + z**2 / of) * (share * (1 - share) / of + z**2 / (4 * of**2)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


def _lost(line: Line, variants: Sequence[int]) -> float:
    """Return how far the best of some variants is behind the best of all."""
    true = truths(line)
    return max(true) - max((true[each - 1] for each in variants), default=0.0)


def truths(line: Line) -> list[float]:
    """Return the fraction of right pictures of each variant."""
    return [right / number for right, number in line["truth"]]


def proposals(lines: Sequence[Line], rates: Sequence[Line]) -> str:
    """Return the proposed learning rates beside the rates of the best variants, as text."""
    rate_of = {line["seed"]: line["rate"] for line in rates}
    shown, num_good = ["seed  proposed  best rate  factor"], 0
    for line in lines:
        true, rate = truths(line), rate_of.get(line["seed"])
        best = list(product(*line["grid"].values()))[true.index(max(true))][0]
        if rate is None:
            shown.append(f"{line['seed']:>4}         -  {best:>9.2g}")
            continue
        num_good += 1 / MAX_FACTOR <= rate / best <= MAX_FACTOR
        shown.append(f"{line['seed']:>4}  {rate:>8.2g}  {best:>9.2g}  {rate / best:>6.2f}")
    return "\n".join([*shown, "", f"within a factor of {MAX_FACTOR:g}: {num_good} of {len(lines)}"])


def _names(grid: dict[str, list[Any]]) -> list[str]:
    keys = [key.rpartition(".")[2].removeprefix("learning_") for key in grid]
    return [
        ", ".join(
            f"{key.removeprefix('learning_')} {value:g}" for key, value in zip(keys, values, strict=True)
        )
        for values in product(*grid.values())
    ]


def _behind(line: Line, winner: str) -> float:
    """Return how far a winner is behind the best variant; without a winner, how good the best one is."""
    return _lost(line, [] if line[winner] is None else [line[winner]])


def _error(line: Line) -> float:
    """Return the standard error of the difference between the best variant and the winner."""
    true, winner = truths(line), line["winner"]
    best = true.index(max(true))
    compared = {best, best if winner is None else winner - 1}
    if len(compared) == 1:
        return 0.0
    return sum(true[each] * (1 - true[each]) / line["truth"][each][1] for each in compared) ** 0.5


def _behind_finalists(line: Line) -> float:
    last = max(row[1] for row in line["halving"])
    return _lost(line, [row[0] for row in line["halving"] if row[1] == last])


def _unpaired(lines: Sequence[Line], names: Sequence[str]) -> list[str]:
    """Return the seeds with which an unpaired comparison would find what a sweep finds with one."""
    if len(lines) < 2:
        return ["an unpaired comparison needs the results of more seeds"]
    scores = [[row[2] for row in sorted(line["complete"])] for line in lines]
    by_variant = list(zip(*scores, strict=True))
    means = [mean(each) for each in by_variant]
    best = means.index(max(means))
    shown = [f"seeds that an unpaired comparison with {names[best]} needs, and seeds of which one decides:"]
    for number, name in enumerate(names):
        if number == best:
            continue
        spread = variance(by_variant[best]) + variance(by_variant[number])
        difference = means[best] - means[number]
        needed = max(2, -(-_FACTOR * spread // difference**2))
        decided = sum(_is_decided(line, best + 1, number + 1) for line in lines)
        shown.append(f"  {name:<19}  {needed:>6,.0f}   {decided} of {len(lines)}")
    return shown


def _is_decided(line: Line, best: int, other: int) -> bool:
    """Return whether the losses of one seed show that a variant is worse than the best: a paired interval."""
    after = [np.array(line["losses"][number - 1][-1]) for number in (best, other)]
    low = grid_interval((after[1] - after[0])[:, None]).low
    return low is not None and low > 0
