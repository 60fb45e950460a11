"""`latentline diagnose --influence` on a small run that is trained in this process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest

from pipeline.cli.diagnose import command
from pipeline.diagnosis.influence import (
    Change,
    estimated_changes,
    fork_without,
    measure_influence,
    paired_change,
)
from pipeline.encoding.workers import WORKERS
from pipeline.errors import LaunchError, TrainingError
from pipeline.log import discard
from pipeline.processes.launch import TRAINING_MODULE
from pipeline.reporting.reports import read_report
from pipeline.trained_lora.run_folder import MARKER, RunLayout, checkpoints_with
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.conftest import any_precision, one_thread
from tests.pipeline.trained_lora.runs import run, run_folders

if TYPE_CHECKING:
    from pipeline.reporting.reports import Report
    from tests.pipeline.trained_lora.project import Project

__all__ = ["any_precision", "one_thread"]

HELD_OUT = {"photos": {"validation_fraction": 0.3}}


def influence(project: Project, launch: InProcessLaunch, num_left_out: int = 1) -> Report:
    return measure_influence(project.recipe, run=None, num_left_out=num_left_out, launch=launch, log=discard)


def trained(make_project: Callable[..., Project], **training: Any) -> Project:
    settings = {"steps": 6, "checkpoint_every": 2, "keep_checkpoints": None, "datasets": HELD_OUT}
    project = make_project(**{**settings, **training})
    run(project, InProcessLaunch())
    return project


def test_images_are_ranked_and_the_worst_are_left_out_of_a_training(
    make_project: Callable[..., Project], capsys: pytest.CaptureFixture[str]
) -> None:
    project = trained(make_project)
    launch = InProcessLaunch(stop_after=3)
    with pytest.raises(LaunchError, match="stopped"):
        influence(project, launch)
    # Stopped in the training without images, which has a checkpoint now; the gradients are in the cache.
    assert launch.modules == [WORKERS["influences"], TRAINING_MODULE]
    launch = InProcessLaunch()
    report = influence(project, launch)
    assert set(launch.modules) == {TRAINING_MODULE}
    assert any("resuming from the checkpoint of step 4" in line for line in launch.lines)

    table = pl.read_parquet(project.recipe.output_dir / "reports" / "influence.parquet")
    estimates = table["estimate"].to_list()
    assert estimates == sorted(estimates)
    assert len(table) == report["samples"] > 3
    assert estimates[0] < 0
    assert report["gradients_at"] == [2, 4]
    assert report["without"]["images"] == table["sample_id"][:1].to_list()
    assert report["comparison"]["images"] != report["without"]["images"]
    assert report["without"]["low"] < report["without"]["change"] < report["without"]["high"]
    assert "without this image the held-out loss is" in report["why"]
    assert read_report(project.recipe.output_dir, "influence") == report

    # Nothing is measured again, and no other command sees these trainings.
    launch = InProcessLaunch()
    again = influence(project, launch)
    assert launch.modules == []
    assert {name: again[name] for name in ("without", "comparison", "worst")} == {
        name: report[name] for name in ("without", "comparison", "worst")
    }
    assert len(run_folders(project)) == 1

    # The command has nothing to launch either.
    capsys.readouterr()
    assert command.callback is not None
    command.callback(recipe=project.recipe, influence=True, run=None, num_left_out=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"* {100 * estimates[0]:+.2f}%  {table['sample_id'][0]}: ")
    assert f"{report['why']}, trained without the images with *" in lines


def test_a_run_without_what_it_needs_is_refused(make_project: Callable[..., Project]) -> None:
    project = trained(make_project, datasets={"photos": {}})
    with pytest.raises(TrainingError, match="at least 2 held-out images") as caught:
        influence(project, InProcessLaunch())
    assert "validation_fraction" in caught.value.fix


def test_a_run_with_its_last_checkpoint_alone_is_refused(make_project: Callable[..., Project]) -> None:
    project = trained(make_project)
    (folder,) = run_folders(project)
    for step, checkpoint in checkpoints_with(RunLayout(folder), MARKER).items():
        if step < 6:
            shutil.rmtree(checkpoint)
    with pytest.raises(TrainingError, match="no training state from before its last step") as caught:
        influence(project, InProcessLaunch())
    assert "training.keep_checkpoints to null" in caught.value.fix

    (RunLayout(folder).validation).unlink()
    with pytest.raises(TrainingError, match="not measured the loss of each held-out image"):
        influence(project, InProcessLaunch())


def test_an_estimate_adds_up_the_showings_of_an_image_at_their_learning_rates(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(datasets=HELD_OUT, gradient_accumulation=1).job()
    names = job.inputs.trained.table["variant_id"].to_list()
    steps = [1, 4]
    influences = {(name, step): float(step) for name in names for step in steps}
    changes = estimated_changes(job, influences, {step: 0.5**step for step in range(6)}, steps)
    for name in names:
        expected = sum(
            0.5**number / batch.num_samples * (1.0 if number < 4 else 4.0)
            for number, batch in enumerate(job.plan())
            for slot in batch.slots()
            if slot.variant_id == name and number >= 1
        )
        assert changes[name] == pytest.approx(expected)


def test_the_folder_of_a_fork_depends_on_the_images_and_on_no_order(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(datasets=HELD_OUT).job()
    first, second, third = job.inputs.trained.table["sample_id"][:3]
    name = fork_without(job, [first, second], 2).run
    assert fork_without(job, [second, first], 2).run == name
    assert fork_without(job, [first, third], 2).run != name
    assert fork_without(job, [first, second], 4).run != name
    assert fork_without(job, [first], 2).left_out == {first}


def test_a_change_is_relative_and_its_interval_paired() -> None:
    before = np.array([1.0, 2.0, 3.0])
    change = paired_change(before, before * 0.98)
    assert change.change == pytest.approx(-0.02)
    # Student's quantile with two degrees of freedom is 4.303.
    half = 4.3027 * np.std([0.01, 0.02, 0.03], ddof=1) / 3**0.5
    assert (change.low, change.high) == pytest.approx((-0.02 - half, -0.02 + half), rel=1e-3)
    assert Change(-0.021, -0.028, -0.014).text() == "2.1% lower (1.4 to 2.8)"
    assert Change(0.003, -0.001, 0.007).text() == "0.3% higher (-0.1 to 0.7)"
