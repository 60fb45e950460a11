"""The report of the study compares each method with the best step that keeps known shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from demo.choosing.report import FinishedRun, read_runs, report

LEVELS = {30: 0.2, 60: 0.8, 90: 0.85, 120: 0.4}


def _line(step: int, concept: float, known: float, loss: float | None, **more: Any) -> dict[str, Any]:
    return {
        "run": "made up",
        "step": step,
        "concept": concept,
        "known": known,
        "validation_loss": loss,
        **more,
    }


def _run(known: dict[int, float] | None = None) -> FinishedRun:
    lines = [_line(0, 0.0, 0.9, 0.5)]
    for step, level in LEVELS.items():
        # 12 prompts with 4 seeds, whose scores differ by a fixed pattern.
        learned = [
            [round(level + 0.05 * ((row + column) % 3 - 1), 4) for column in range(4)] for row in range(12)
        ]
        scores = {"learned": learned, "drift": [[0.01] * 4] * 10}
        lines.append(
            _line(step, level, (known or {}).get(step, 0.9), 0.3 - 0.001 * step, world=scores, pixels=scores)
        )
    return FinishedRun("made up", lines)


def test_the_best_step_is_the_one_with_the_highest_truth() -> None:
    assert _run().best() == 90
    assert _run().choice("world").step == 90


def test_a_step_that_lost_known_shapes_is_not_the_best() -> None:
    run = _run(known={90: 0.7})
    assert run.best() == 60
    assert run.published(90).lost == 0.2
    assert not run.published(90).is_good


def test_the_last_step_and_the_lowest_loss_are_measured_against_the_best() -> None:
    run = _run()
    assert (run.last(), run.lowest_loss()) == (120, 120)
    assert run.published(120).ratio == pytest.approx(0.4 / 0.85)


def test_results_are_read_by_run_and_step(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    lines = list(_run().lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)), encoding="utf-8")
    (run,) = read_runs(file)
    assert [line["step"] for line in run.lines] == [0, 30, 60, 90, 120]
    assert read_runs(tmp_path / "missing.jsonl") == []


def test_the_report_counts_good_steps_by_method() -> None:
    text = report([_run(), _run(known={120: 0.5})])
    assert "| made up | 90: 0.85 | 90: 1.00 | 90: 1.00 | 120: 0.47 | 120: 0.47 |" in text
    assert (
        "| made up | 90: 0.85 | 90: 1.00 | 90: 1.00 | 120: 0.47, lost 0.40 | 120: 0.47, lost 0.40 |" in text
    )
    assert "| chosen, world | 2 | 2 | 0 | 0 | 1.000 |" in text
    assert "| last step | 0 | 0 | 1 | 0 | 0.471 |" in text
