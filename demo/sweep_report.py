"""Figures of the sweeps in demo/results/sweep.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean, variance
from typing import Any

import numpy as np

from pipeline.evaluation.intervals import grid_interval

Line = dict[str, Any]

MAX_BEHIND = 0.03
"""Largest difference of a good winner to the best variant, as a fraction of right pictures."""

MAX_FACTOR = 3.0
"""Largest ratio of a good proposal of a rate to the rate of the best variant, in either direction."""

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
    true, number = truths(line), line[winner]
    return max(true) - (0.0 if number is None else true[number - 1])


def _error(line: Line) -> float:
    """Return the standard error of the difference between the best variant and the winner."""
    true, winner = truths(line), line["winner"]
    best = true.index(max(true))
    compared = {best, best if winner is None else winner - 1}
    if len(compared) == 1:
        return 0.0
    return sum(true[each] * (1 - true[each]) / line["truth"][each][1] for each in compared) ** 0.5


def _behind_finalists(line: Line) -> float:
    true, last = truths(line), max(row[1] for row in line["halving"])
    return max(true) - max(true[row[0] - 1] for row in line["halving"] if row[1] == last)


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
