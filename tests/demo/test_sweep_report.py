"""The figures of the study of sweeps are counted from its lines."""

from __future__ import annotations

from typing import Any

import pytest

from demo.sweep_report import Line, proposals, reached_by_losses, report, rules_report, share_interval, truths
from pipeline.recipe.sweep import HalvingSettings


def _line(seed: int, scores: list[float], right: list[int], winner: int | None) -> Line:
    # Losses on two held-out images, before the training and after it; two of four variants reach the end.
    losses = [[[0.2, 0.3], [0.2 - score, 0.3 - score]] for score in scores]
    rows: list[list[Any]] = [[number, 10, score, 0, 0, 0] for number, score in enumerate(scores, start=1)]
    rows += [[number, 20, scores[number - 1], 0, 0, 0] for number in (2, 3)]
    return {
        "seed": seed,
        "grid": {"training.learning_rate": [0.1, 0.2], "training.lora.rank": [4, 8]},
        "steps": 30,
        "steps_of_all": 80,
        "winner": winner,
        "winner_by_loss": 2,
        "launches": {"pipeline.trained_lora.worker": 4},
        "halving": rows,
        "complete": [[number, 20, score, 0, 0, 0] for number, score in enumerate(scores, start=1)],
        "losses": losses,
        "truth": [[each, 100] for each in right],
    }


_SLOW_AT_FIRST = [
    [[9 - fall] for fall in falls]
    for falls in ([0, 4, 4.5, 5, 5, 5], [0, 1, 1, 1, 1, 1], [0, 3, 4.4, 6, 7, 7], [0, 2, 2, 2, 2, 2])
]
"""Losses on one image of four variants, before the training and after each of 5 parts of it.

The third variant is behind the first one at first.
"""


def test_the_report_counts_good_winners_and_seeds_of_an_unpaired_comparison() -> None:
    lines = [
        _line(1, [0.01, 0.02, 0.09, 0.06], [0, 0, 80, 82], winner=3),
        _line(2, [0.03, 0.02, 0.08, 0.07], [0, 0, 60, 90], winner=3),
    ]
    assert truths(lines[0]) == pytest.approx([0, 0, 0.8, 0.82])
    shown = report(lines)
    assert "the winner: 1 of 2" in shown
    assert "by the loss on held-out images: 0 of 2" in shown
    assert "that reach the end: 1 of 2" in shown
    assert "launches that encoded images or texts during the sweeps: 0" in shown
    # Variances of 0.00005 each, and means of 0.085 and 0.065: 7.84 * 0.0001 / 0.02**2 = 1.96.
    last = shown.splitlines()[-1].split()
    assert last == ["rate", "0.2,", "rank", "8", "2", "2", "of", "2"]
    assert report([]) == "no seeds yet"


def test_proposals_are_compared_with_the_rate_of_the_best_variant() -> None:
    lines = [
        _line(1, [0.01, 0.02, 0.09, 0.06], [0, 0, 80, 82], winner=3),
        _line(2, [0.03, 0.02, 0.08, 0.07], [90, 0, 60, 20], winner=3),
    ]
    shown = proposals(lines, [{"seed": 1, "rate": 0.07}, {"seed": 2, "rate": 0.04}])
    assert [row.split() for row in shown.splitlines()[1:3]] == [
        ["1", "0.07", "0.2", "0.35"],
        ["2", "0.04", "0.1", "0.40"],
    ]
    assert shown.endswith("within a factor of 3: 2 of 2")
    assert proposals(lines, [{"seed": 1, "rate": 0.06}]).endswith("within a factor of 3: 0 of 2")


def test_rules_are_compared_with_complete_grids_by_how_far_their_winners_are_behind() -> None:
    def rules_line(seed: int, right: list[int], winner: int | None, reached: list[int]) -> Line:
        rule = {"steps": 32, "reached": reached, "winner": winner, "judged": []}
        best = {**rule, "winner": right.index(max(right)) + 1}
        line = _line(seed, [0.01, 0.02, 0.09, 0.06], right, winner)
        return {
            **line,
            "rules": {"half": rule, "best": best},
            "complete_by_losses": 3,
            "complete_by_pictures": 4,
        }

    lines = [
        rules_line(11, [0, 0, 80, 82], 3, [3, 4]),
        rules_line(12, [0, 0, 60, 90], None, [2, 3]),
    ]
    first = _line(1, [0.01, 0.02, 0.09, 0.06], [60, 70, 90, 0], winner=1)
    first |= {"complete_winner_by_loss": 3, "losses": _SLOW_AT_FIRST, "save_every": 4}
    shown = [" ".join(row.split()) for row in rules_report(lines, [first]).splitlines()]
    assert "half 40% 1 of 2 (9% to 91%) 0.46, 0.90" in shown
    assert "complete grid, losses 100% 1 of 2 (9% to 91%) 0.16, 0.30" in shown
    assert "complete grid, pictures 100% 2 of 2 (34% to 100%) 0.00, 0.00" in shown
    assert "half 1 of 2" in shown, "a good variant reached the end with the first seed only"
    assert "12 rate 0.2, rank 8 0.90 0.90 0.00 0.30 0.00" in shown
    # The mean and half of the difference times Student's t with one degree of freedom: 0.46 and 0.44 * 12.7.
    assert "behind with half, minus with best: 0.46 (-5.13 to 6.05)" in shown
    assert "losses, a third goes on 38% 0 of 1 (0% to 79%) 0.30, 0.30" in shown
    assert "losses, first study, 43% of steps 0 of 1" in shown
    assert "expected losses, first study, 43% of steps 1 of 1" in shown
    assert rules_report([], []) == "no seeds yet"


def test_the_first_study_is_judged_again_by_its_stored_losses() -> None:
    line = {"losses": _SLOW_AT_FIRST, "steps_of_all": 80, "save_every": 4}
    halving = HalvingSettings(first=0.2, keep=0.5)
    assert reached_by_losses(line, halving, expects=False) == [1]
    assert reached_by_losses(line, halving, expects=True) == [3]


def test_the_interval_of_a_fraction_is_wilsons() -> None:
    # The values of R: prop.test(9, 10, correct = FALSE).
    assert share_interval(9, 10) == pytest.approx((0.5958, 0.9821), abs=1e-3)
    assert share_interval(0, 10)[0] == 0.0
