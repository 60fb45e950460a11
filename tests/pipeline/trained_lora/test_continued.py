"""A run that continues another one after a change of its data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import LaunchError, TrainingError
from pipeline.log import discard
from pipeline.maintenance.training_forecast import forecast_training
from pipeline.recipe.overrides import CONTINUE
from pipeline.reporting.findings import CheckContext
from pipeline.storage.tables import Tables
from pipeline.trained_lora import checks
from pipeline.trained_lora.provenance import find_in_provenance
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.trained_lora.stage import plan_run, train_lora
from pipeline.trained_lora.worker.checkpoint import checkpoint_path, load_checkpoint
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.project import put, write_tables
from tests.pipeline.trained_lora.runs import bits, run, run_folders
from tests.pipeline.trained_lora.worker.engine_steps import engine_of, one_step

if TYPE_CHECKING:
    from pipeline.reporting.reports import StageResult
    from tests.pipeline.trained_lora.project import Project

Make = Callable[..., "Project"]

STEPS = 8
FIRST = 4
"""Steps of the first run, with a checkpoint at its end."""


def with_caption(project: Project, caption: str) -> Project:
    """Return the project with another caption of its first sample."""
    row = project.text.row(0, named=True)
    entries = RecipeEntries(project.recipe)
    spec = entries.text_spec(caption)
    length = next(iter(spec.tensors.values())).shape[0]
    changed = {**row, "caption": caption, "text_length": length, **put(entries, spec)}
    first = pl.int_range(pl.len()) == 0
    text = project.text.with_columns(
        pl.when(first).then(pl.lit(changed[name], kind)).otherwise(pl.col(name)).alias(name)
        for name, kind in project.text.schema.items()
    )
    edited = replace(project, text=text)
    write_tables(edited)
    return edited


@pytest.fixture
def corrected(make_project: Make) -> tuple[Project, str]:
    """A project with a caption that was corrected after a run of `FIRST` steps, and the id of that run."""
    project = make_project(steps=FIRST, checkpoint_every=2)
    run(project, InProcessLaunch())
    (old,) = run_folders(project)
    return with_caption(project.changed("output", steps=STEPS), "a corrected caption"), old.name


def go_on(project: Project, wanted: str, launch: InProcessLaunch | None = None) -> StageResult:
    log: list[str] = []
    result = train_lora(
        project.recipe,
        project.latents,
        project.text,
        launch=launch or InProcessLaunch(),
        log=log.append,
        overrides={CONTINUE: wanted},
    )
    result.report["log"] = log
    return result


def weights_of(project: Project, run_name: str) -> dict[str, str]:
    layout = RunLayout(project.recipe.output_dir / "runs" / run_name)
    return bits(load_checkpoint(checkpoint_path(layout.checkpoints, STEPS), run_name).adapter)


def by_hand(project: Project, old: str) -> dict[str, str]:
    """Train the last steps on the changed data from the old run's checkpoint, without a training process."""
    job, _, _ = plan_run(RecipeEntries(project.recipe), project.latents, project.text, log=discard)
    layout = RunLayout(project.recipe.output_dir / "runs" / old)
    engine = engine_of(job)
    engine.restore(load_checkpoint(checkpoint_path(layout.checkpoints, FIRST), old))
    for step in range(FIRST, STEPS):
        one_step(engine, job, step)
    return bits(engine.state(STEPS).adapter)


def test_R18_the_weights_are_those_of_the_last_steps_on_the_changed_data(
    corrected: tuple[Project, str],
) -> None:
    project, old = corrected
    result = go_on(project, "latest")
    new = result.report["run"]
    assert (result.report["resumed_from"], result.report["steps"]) == (FIRST, STEPS)
    assert weights_of(project, new) == by_hand(project, old)

    # Both parts are recorded, and the checks accept the run.
    (note,) = [line for line in result.report["log"] if line.startswith("note: ")]
    assert note.startswith(f"note: {STEPS - FIRST} steps to train, about ")
    assert (
        f": run {new} is new; it continues run {old} at step {FIRST}; it differs from {old} in caption"
        in note
    )
    context = CheckContext(project.recipe, Tables(project.recipe.output_dir))
    assert [each.summary for each in checks.run(context) if each.closes] == []
    lora = project.recipe.output_dir / "lora"
    record = json.loads((lora / "provenance.json").read_text())
    assert (record["continues"]["run"], record["continues"]["step"]) == (old, FIRST)
    assert record["facts"]["continues"] == {"run": old, "step": FIRST}
    assert (
        f"| continues | run {old} from step {FIRST}, trained on 8 images |"
        in (lora / "README.md").read_text()
    )
    assert len(read_metrics(RunLayout(lora.parent / "runs" / new).metrics, STEPS)) == STEPS
    seen_alone = run(project.changed("alone", steps=STEPS), InProcessLaunch()).table["times_seen"].sum()
    assert 0 < result.table["times_seen"].sum() < seen_alone

    # The corrected caption's old text is found in the run before.
    caption = Path(lora.parent / "old.txt")
    caption.write_text("photograph 0 of 32x96")
    found = find_in_provenance(record, lora, caption)
    assert found == [f"{caption} is one of the training captions, in run {old}, which this run continues"]

    # The same command again trains nothing.
    again = go_on(project, "latest")
    assert (again.report["run"], again.report["launched"]) == (new, False)
    assert len(run_folders(project)) == 2


def test_R18_a_stopped_run_resumes_and_ends_with_the_same_weights(corrected: tuple[Project, str]) -> None:
    project, old = corrected
    with pytest.raises(LaunchError):
        go_on(project, old, InProcessLaunch(stop_after=FIRST + 1))
    result = go_on(project, "latest")
    assert FIRST < result.report["resumed_from"] < STEPS
    assert weights_of(project, result.report["run"]) == by_hand(project, old)
    assert len(run_folders(project)) == 2


def test_a_forecast_is_about_the_run_that_goes_on(corrected: tuple[Project, str]) -> None:
    project, old = corrected
    entries = RecipeEntries(project.recipe)
    alone = forecast_training(entries, project.latents, project.text).action
    action = forecast_training(entries, project.latents, project.text, continue_run="latest").action
    assert (alone.steps_left, action.steps_left) == (STEPS, STEPS - FIRST)
    assert action.reason.startswith(
        f"it continues run {old} at step {FIRST}; it differs from {old} in caption"
    )
    assert run_folders(project) == [project.recipe.output_dir / "runs" / old], "nothing is written"
    assert go_on(project, "latest").report["run"] == action.run != alone.run


def test_without_a_change_the_run_itself_resumes(make_project: Make) -> None:
    project = make_project(steps=FIRST, checkpoint_every=2)
    run(project, InProcessLaunch())
    result = go_on(project.changed("output", steps=STEPS), "latest")
    assert (result.report["run"], result.report["resumed_from"]) == (run_folders(project)[0].name, FIRST)
    assert len(run_folders(project)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 2e-2}, "optimizer.learning_rate 0.01 -> 0.02"),
        ({"optimizer": "adafactor"}, "optimizer.kind adamw -> adafactor"),
    ],
)
def test_settings_that_are_in_the_state_are_refused(
    corrected: tuple[Project, str], changes: dict[str, Any], message: str
) -> None:
    project, old = corrected
    with pytest.raises(TrainingError, match="cannot be continued with other settings") as raised:
        go_on(project.changed("output", **changes), old)
    assert message in raised.value.what
    assert "training.lora.start_from: " in raised.value.fix
    assert len(run_folders(project)) == 1


def test_a_run_without_a_usable_checkpoint_is_refused(corrected: tuple[Project, str]) -> None:
    project, old = corrected
    with pytest.raises(TrainingError, match="has no checkpoint with its optimizer state before step 2"):
        go_on(project.changed("output", steps=2), old)
    with pytest.raises(TrainingError, match="the run 0123456789abcdef does not exist"):
        go_on(project, "0123456789abcdef")
