"""The stored runs of the study: today's rule chooses good steps, and the documentation has their tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from demo.choosing.__main__ import CHOICES_FILE, add_runs
from demo.choosing.report import FinishedRun, Published, read_runs, report
from demo.choosing.runs import study_runs
from pipeline.recipe.project import project_root

MIN_GOOD = 0.85
"""Minimum part of the runs with a best step in which the chosen step is good."""

MAX_WRONG = 1
"""Maximum number of choices that are not good by more than two standard errors."""


@pytest.fixture(scope="module")
def runs() -> list[FinishedRun]:
    return read_runs(CHOICES_FILE)


def _chosen(runs: Sequence[FinishedRun], scorer: str) -> list[Published]:
    steps = [(run, run.choice(scorer).step) for run in runs if run.has_best]
    return [run.published(step) for run, step in steps if step is not None]


def test_the_chosen_step_is_as_good_as_the_best_and_keeps_known_shapes(runs: list[FinishedRun]) -> None:
    chosen = _chosen(runs, "world")
    assert len(runs) == 30
    assert sum(step.is_good for step in chosen) >= MIN_GOOD * sum(run.has_best for run in runs)
    assert sum(not step.may_be_good for step in chosen) <= MAX_WRONG


def test_the_documentation_has_the_tables_of_the_stored_runs(runs: list[FinishedRun]) -> None:
    page = (project_root() / "docs" / "evaluation.md").read_text("utf-8")
    assert report(runs) in page, "run python -m demo.choosing FOLDER --runs 0, and copy the tables"


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_runs_that_are_trained_again_choose_as_well(tmp_path: Path) -> None:
    add_runs(study_runs(), tmp_path, tmp_path / "results.jsonl")
    runs = read_runs(tmp_path / "results.jsonl")
    chosen = _chosen(runs, "world")
    assert sum(step.is_good for step in chosen) >= MIN_GOOD * sum(run.has_best for run in runs)
    assert sum(not step.may_be_good for step in chosen) <= MAX_WRONG
