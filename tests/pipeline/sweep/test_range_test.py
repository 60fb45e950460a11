"""The range test: its rule on known curves, and a short run that resumes and publishes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

from pipeline.cli.main import latentline
from pipeline.errors import SweepError
from pipeline.processes import launch as processes
from pipeline.processes.launch import TRAINING_MODULE
from pipeline.recipe.schema import RecipeFile
from pipeline.sweep.range_test import DIVISOR, find_learning_rate, propose
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from tests.in_process_worker import InProcessLaunch

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

RATES = list(np.geomspace(1e-5, 1e-1, 41))


def measured(losses: Sequence[float]) -> list[dict[str, Any]]:
    return [{"step": 4 * number, "loss": loss} for number, loss in enumerate(losses)]


def test_the_proposal_is_the_rate_of_the_lowest_loss_divided_by_a_constant() -> None:
    # A parabola of the logarithm, with its vertex at 3e-3. After 4 steps, the last rate is the one of step 3.
    losses = [0.2] + [0.1 + 0.01 * math.log(RATES[step - 1] / 3e-3) ** 2 for step in range(4, 41, 4)]
    losses[0], losses[-1] = 0.9, math.nan
    result = propose("run", RATES, measured(losses))
    assert result.rate == pytest.approx(3e-3 / DIVISOR, rel=0.01)
    assert f"learning_rate {result.rate:.2g}: the loss on held-out images falls from 0.9 to 0.1" in result.why

    # Without a rate before the lowest loss, or a loss after it, it is the rate of the measurement itself.
    for ends in ([0.2, 0.1, 0.3], [0.2, 0.19, 0.1, math.nan]):
        lowest = ends.index(0.1)
        rate = propose("run", RATES, measured(ends)).rate
        assert rate == pytest.approx(RATES[4 * lowest - 1] / DIVISOR, rel=0.05)


@pytest.mark.parametrize(
    ("losses", "what", "fix"),
    [
        ([0.1, 0.11, 0.2], "does not fall", "lower it tenfold"),
        ([0.1, 0.09, 0.08], "is lowest at the end", "raise it tenfold"),
    ],
)
def test_a_lowest_loss_at_an_end_of_the_range_proposes_nothing(
    losses: list[float], what: str, fix: str
) -> None:
    with pytest.raises(SweepError, match=what) as excinfo:
        propose("run", RATES, measured(losses))
    assert fix in excinfo.value.fix


def test_the_run_has_a_rising_rate_and_resumes_and_publishes_nothing(
    make_project: Callable[..., Project], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = {"photos": {"validation_fraction": 0.4}}
    schedule = {"lr_scheduler": "cosine", "warmup_steps": 2, "checkpoint_every": 2, "ema_decay": 0.9}
    project = make_project(
        datasets=datasets, steps=15, gradient_accumulation=1, learning_rate=1e-3, **schedule
    )
    arguments = (project.recipe, project.latents, project.text)
    with pytest.raises(Exception, match="stopped"):
        find_learning_rate(*arguments, launch=InProcessLaunch(stop_after=3), log=str)

    launch = InProcessLaunch()
    monkeypatch.setattr(processes, "LocalLaunch", lambda *_: launch)
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(tmp_path))
    values = project.recipe.model_dump(mode="json", include=set(RecipeFile.model_fields))
    # JSON is YAML too.
    (tmp_path / "demo.yaml").write_text(json.dumps(values), encoding="utf-8")
    shown = CliRunner().invoke(latentline, ["sweep", "demo", "--find", "learning_rate"])
    # The lowest loss of a model with random weights may be at an end, where nothing is proposed.
    assert "the loss on held-out images" in shown.output + str(shown.exception)
    assert launch.modules == [TRAINING_MODULE]

    output = project.recipe.output_dir
    (folder,) = (output / "runs").iterdir()
    rates = [line["learning_rate"] for line in read_metrics(RunLayout(folder).metrics, 100)]
    assert rates == pytest.approx(list(np.geomspace(1e-4, 1e-1, 6)))
    assert [line["step"] for line in read_metrics(RunLayout(folder).validation, 100)] == list(range(7))
    assert not (output / "lora").exists()


def test_a_recipe_without_held_out_images_or_with_a_rate_of_its_own_is_refused(
    make_project: Callable[..., Project],
) -> None:
    launch = InProcessLaunch()
    for settings, what in (
        ({"optimizer": "prodigy", "learning_rate": 1.0}, "the optimizer prodigy has no rate"),
        ({}, "needs held-out images"),
    ):
        project = make_project(**settings)
        with pytest.raises(SweepError, match=what):
            find_learning_rate(project.recipe, project.latents, project.text, launch=launch, log=str)
    assert launch.modules == []
