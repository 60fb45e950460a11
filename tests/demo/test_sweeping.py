"""A seed of the study of sweeps, trained and measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.sweep_report import read_lines, truths
from demo.sweeping import add_seeds
from pipeline.processes.launch import TRAINING_MODULE


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_sweep_of_twelve_variants_costs_two_fifths_and_its_winner_draws_the_shape(tmp_path: Path) -> None:
    add_seeds([1], tmp_path, tmp_path / "sweep.jsonl")
    (line,) = read_lines(tmp_path / "sweep.jsonl")
    assert line["steps"] <= 0.4 * line["steps_of_all"]
    assert line["launches"].keys() == {TRAINING_MODULE, "pipeline.evaluation.worker"}, (
        "nothing is encoded again"
    )
    assert truths(line)[line["winner"] - 1] > 0.6
