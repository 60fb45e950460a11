"""The figures of the study of sweeps are counted from its lines."""

from __future__ import annotations

from typing import Any

import pytest

from demo.sweep_report import Line, proposals, report, truths


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
