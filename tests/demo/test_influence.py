"""The study of influence; the complete one is `python -m demo.influence`."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.influence import NUM_WRONG, report, trial


def test_the_report_has_rank_correlations_and_the_trainings_without_pictures() -> None:
    result = {
        "seed": 0,
        "images": ["a", "b", "c", "d"],
        "wrong": ["a"],
        "without_each": [-0.2, -0.1, 0.0, 0.1],
        "adam": [-0.9, -0.5, -0.4, -0.1],
        "plain": [0.1, 0.2, 0.3, -0.1],
        "changes": {
            "worst": [-0.2, -0.3, -0.1],
            "middle": [0.0, -0.05, 0.05],
            "wrong": [-0.25, -0.3, -0.2],
        },
    }
    # In the second seed, the order of the true changes is the opposite.
    opposite = {**result, "seed": 1, "without_each": [0.1, 0.0, -0.1, -0.2]}
    lines = list(report([result, opposite]))
    assert "| 0 | 1.00 | -0.20 | 1 of 1 |" in lines
    assert "| mean | 0.00 | 0.00 | |" in lines
    assert "| 0 | -20.0% (-30.0 to -10.0) | +0.0% (-5.0 to +5.0) | -25.0% (-30.0 to -20.0) |" in lines
    assert lines[-1].endswith("mean rank correlation of -1.00")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_wrong_captions_harm_the_held_out_loss_and_are_among_the_worst(tmp_path: Path) -> None:
    result = trial(tmp_path, tmp_path / "cache", 0)
    change, _, high = result["changes"]["wrong"]
    assert change < high < 0
    worst = sorted(zip(result["adam"], result["images"], strict=True))[: 2 * NUM_WRONG]
    assert len({name for _, name in worst} & set(result["wrong"])) >= NUM_WRONG / 2
