"""The report of the study compares each method with the best step that keeps known shapes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.choosing.report import FinishedRun, read_runs, report

LEVELS = {30: 0.2, 60: 0.75, 90: 0.85, 120: 0.4}
PROMPTS, PICTURES = 20, 6
SECONDS = {"pictures": 10.0, "features": 1.0, "truth": 40.0, "training": 100.0}


def _pictures(fraction: float) -> list[str]:
    # Right pictures alternate between the halves, so that both have the same fraction.
    right = round(fraction * PROMPTS * PICTURES)
    digits = "1" * right + "0" * (PROMPTS * PICTURES - right)
    return [digits[start : start + PICTURES] for start in range(0, len(digits), PICTURES)]


def _line(step: int, concept: float, known: float, loss: float | None, **more: Any) -> dict[str, Any]:
    pictures = {"concept": _pictures(concept), "known": _pictures(known)}
    return {"run": "made up", "step": step, **pictures, "validation_loss": loss, **more}


def _run(known: Mapping[int, float] | None = None, levels: Mapping[int, float] = LEVELS) -> FinishedRun:
    lines = [_line(0, 0.0, 0.9, 0.5, cpu_seconds=SECONDS)]
    for step, level in levels.items():
        # 12 prompts with 4 seeds, whose scores differ by a fixed pattern.
        learned = [
            [round(level + 0.05 * ((row + column) % 3 - 1), 4) for column in range(4)] for row in range(12)
        ]
        scores = {"learned": learned, "drift": [[0.01] * 4] * 10}
        known_level = (known or {}).get(step, 0.9)
        lines.append(_line(step, level, known_level, 0.3 - 0.001 * step, world=scores, pixels=scores))
    return FinishedRun("made up", lines)


def test_the_best_step_is_the_one_with_the_highest_truth() -> None:
    assert _run().best() == 90
    assert _run().choice("world").step == 90
    assert _run().best_truth == pytest.approx(0.85)


def test_a_step_that_lost_known_shapes_is_not_the_best() -> None:
    run = _run(known={90: 0.7})
    assert run.best() == 60
    assert run.published(90).lost == pytest.approx(0.2)
    assert run.published(90).ratio > 1
    assert not run.published(90).is_good
    assert not run.published(90).may_be_good


def test_the_last_step_and_the_lowest_loss_are_measured_against_the_best() -> None:
    run = _run()
    assert (run.last(), run.lowest_loss()) == (120, 120)
    assert run.published(120).ratio == pytest.approx(0.4 / 0.85)
    assert run.published(90).error == 0


def test_luck_makes_no_step_the_best_and_the_standard_error_covers_it() -> None:
    """Eight equal steps, 200 times: with the same pictures for both, the mean ratio would be 0.89."""
    random = np.random.default_rng(0)
    ratios: list[float] = []
    errors: list[float] = []
    for _ in range(200):
        lines: list[dict[str, Any]] = [_line(0, 0.0, 0.9, None)]
        for step in range(1, 9):
            digits = random.binomial(1, 0.5, (PROMPTS, PICTURES))
            right = ["".join(map(str, row)) for row in digits]
            lines.append(_line(step, 0.0, 0.9, 0.1) | {"concept": right})
        published = FinishedRun("made up", lines).published(1)
        ratios.append(published.ratio)
        errors.append(published.error)
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.03)
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.25)


def test_a_miss_within_two_standard_errors_is_no_certain_miss() -> None:
    near, far = _run(levels={30: 0.8, 60: 0.85}).published(30), _run().published(30)
    assert not near.is_good
    assert near.may_be_good
    assert not far.may_be_good


@pytest.mark.parametrize(
    "run",
    [_run(levels={30: 0.0, 60: 0.05}), _run(known=dict.fromkeys(LEVELS, 0.5))],
    ids=["nothing learned", "all steps lost known shapes"],
)
def test_a_run_without_a_good_step_has_no_ratio(run: FinishedRun) -> None:
    assert not run.has_best
    assert math.isnan(run.published(60).ratio)
    text = report([run])
    assert "1 runs. 0 have a best step" in text
    assert "| last step | 0 of 0 | 0 | 0 of 0 | 0 |  |  | 0 of 1 |" in text


def test_results_are_read_by_run_and_step(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    lines = list(_run().lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)), encoding="utf-8")
    (run,) = read_runs(file)
    assert [line["step"] for line in run.lines] == [0, 30, 60, 90, 120]
    assert read_runs(tmp_path / "missing.jsonl") == []
    assert "| method |" in report([])


def test_the_report_counts_good_steps_by_method() -> None:
    text = report([_run(), _run(known={120: 0.5})])
    miss = "120: 0.47 ± 0.05"
    assert f"| made up | 90: 0.85 | 90: 1.00 ± 0.00 | 90: 1.00 ± 0.00 | {miss} | {miss} |" in text
    assert f"| {miss}, lost 0.40 | {miss}, lost 0.40 |" in text
    assert "| chosen, world | 2 of 2 | 2 | 0 of 0 | 0 | 1.000 ± 0.000 | 0.471 ± 0.0" in text
    assert "| last step | 2 of 2 | 0 | 0 of 2 | 1 | 0.471 ± 0.0" in text
    assert "| pictures of the evaluation | 10.0 | 0.10 |" in text
