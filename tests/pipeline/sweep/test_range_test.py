"""The range test: its rule on known curves, and two short runs that leave the recipe's outputs alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pipeline.errors import SweepError
from pipeline.sweep.range_test import find_learning_rate, suggest
from tests.in_process_worker import InProcessLaunch

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

RATES = np.geomspace(1e-6, 1e-2, 100)


def changes(best: float, *, noise: float, seed: int = 0) -> list[float]:
    """Return a loss that falls up to a rate of `best` and rises after it."""
    distance = np.log10(RATES / best)
    curve = np.where(distance < 0, -np.exp(2 * distance), -1 + 10 * distance**2)
    return list(curve + np.random.default_rng(seed).normal(0, noise, len(RATES)))


def test_the_suggestion_is_a_tenth_of_the_rate_with_the_lowest_smoothed_loss() -> None:
    for seed in range(5):
        result = suggest(list(RATES), changes(1e-3, noise=0.2, seed=seed))
        assert result.suggested is not None
        # The moving average lags behind by some steps, of which ten are a factor of 2.5.
        assert 0.6e-4 < result.suggested < 3e-4
        assert "a tenth of that rate is used" in result.why


def test_steps_after_a_loss_that_is_not_finite_do_not_count() -> None:
    broken = [*changes(1e-3, noise=0.0)[:70], math.nan, *[-100.0] * 29]
    result = suggest(list(RATES), broken)
    assert len(result.rates) == len(result.smoothed) == 70
    assert result.suggested == pytest.approx(RATES[69] / 10)


def test_a_loss_that_never_falls_suggests_nothing() -> None:
    rising = suggest(list(RATES), [0.1] * 100)
    assert rising.suggested is None
    assert "no rate lowered the loss" in rising.why


def test_two_short_runs_differ_in_their_rates_alone_and_leave_no_run_behind(
    make_project: Callable[..., Project],
) -> None:
    project, launch = make_project(steps=6, gradient_accumulation=1, learning_rate=1e-3), InProcessLaunch()
    arguments = (project.recipe, project.latents, project.text)
    result = find_learning_rate(*arguments, steps=24, launch=launch, log=launch.lines.append)
    assert len(launch.modules) == 2
    assert result.rates[0] == pytest.approx(1e-5)
    assert result.rates[-1] == pytest.approx(1e-1)
    ratios = [after / before for before, after in zip(result.rates, result.rates[1:], strict=False)]
    assert ratios == pytest.approx([ratios[0]] * 23), "it rises exponentially"
    assert result.changes[0] == 0.0, "the first step of both runs sees the base model, with the same noise"
    assert any(result.changes)

    output = project.recipe.output_dir
    report = json.loads((output / "reports" / "range_test.json").read_text(encoding="utf-8"))
    assert report["why"] == result.why
    assert (output / "reports" / "range_test" / "rates.png").is_file()
    assert not (output / "runs").exists()
    assert not (output / "lora").exists()
    assert not any(Path(file).exists() for file in launch.job_files)


def test_an_optimizer_that_adapts_its_rate_is_refused(make_project: Callable[..., Project]) -> None:
    project, launch = make_project(optimizer="prodigy", learning_rate=1.0), InProcessLaunch()
    with pytest.raises(SweepError, match="the rate of the optimizer prodigy cannot be tested"):
        find_learning_rate(project.recipe, project.latents, project.text, launch=launch, log=str)
    assert launch.modules == []
