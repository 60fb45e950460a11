"""A finished run whose settings or samples change: a new run, a resumed one, or a saved LoRA."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from safetensors.torch import load_file

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import LaunchError
from pipeline.reporting.findings import CheckContext
from pipeline.storage.tables import Tables
from pipeline.trained_lora import checks as trained_lora
from pipeline.trained_lora.previews import before_after, preview_sheet, read_previews
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.project import put, write_tables
from tests.pipeline.trained_lora.runs import FILES, run, run_folders
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def test_R14_a_shortened_run_shows_no_picture_of_a_later_step(make_project: Callable[..., Project]) -> None:
    project = make_project(sample_every=2, sample_prompts=[{"prompt": "a cat", "steps": 2}])
    run(project, InProcessLaunch())
    lora, report = project.recipe.output_dir / "lora", project.recipe.output_dir / "reports" / "trained_lora"
    (folder,) = run_folders(project)
    for steps in (3, 1):
        shorter = project.changed("output", steps=steps)
        run(shorter, InProcessLaunch())
        previews = read_previews(folder / "samples", last_step=steps)
        assert {preview.step for preview in previews} == {0, 2, 3} & {*range(steps + 1)} | {steps}
        assert run_folders(project) == [folder]
        for sheet in (lora / "samples.jpg", report / "samples.jpg", folder / "lora" / "samples.jpg"):
            assert sheet.read_bytes() == preview_sheet(previews)
        assert (report / "before_after.jpg").read_bytes() == before_after(previews)
    assert not (report / "loss.png").exists(), (
        "a run of one step has no curve, and must not show an older one"
    )

    # A job that only writes the report again leaves no picture that its previews cannot show either.
    (folder / "report" / "sample_losses.parquet").unlink()
    for path in (folder / "samples").iterdir():
        path.unlink()
    run(shorter, InProcessLaunch())
    assert {path.name for path in report.iterdir()} == {"sample_losses.parquet"}


def test_R11_a_changed_setting_starts_a_new_run_and_the_log_lists_the_difference(trained: Project) -> None:
    project, launch, log = trained, InProcessLaunch(), list[str]()
    old = json.loads((project.recipe.output_dir / "lora" / "provenance.json").read_text())["run"]
    other = project.changed("output", learning_rate=2e-2)
    run(other, launch, log)
    assert len(run_folders(project)) == 2
    (difference,) = [line for line in log if "is new; it differs from" in line]
    assert difference.startswith("note: ")
    assert f"differs from {old} in optimizer.learning_rate 0.01 -> 0.02" in difference
    changed_back = run(project, launch)
    assert len(launch.job_files) == 1
    assert changed_back.report["run"] == old
    record = json.loads((project.recipe.output_dir / "lora" / "provenance.json").read_text())
    assert record["run"] == old


def test_R11_a_changed_caption_is_named_in_the_log_and_in_the_report(trained: Project) -> None:
    launch, log = InProcessLaunch(), list[str]()
    row = trained.text.row(0, named=True)
    entries = RecipeEntries(trained.recipe)
    spec = entries.text_spec("another caption")
    text_length = next(iter(spec.tensors.values())).shape[0]
    changed = {**row, "caption": "another caption", "text_length": text_length, **put(entries, spec)}
    first = pl.int_range(pl.len()) == 0
    text = trained.text.with_columns(
        pl.when(first).then(pl.lit(changed[name], kind)).otherwise(pl.col(name)).alias(name)
        for name, kind in trained.text.schema.items()
    )
    edited = replace(trained, text=text)
    write_tables(edited)
    result = run(edited, launch, log)
    expected = f"in caption of {row['sample_id']}"
    (line,) = [line for line in log if "is new; it differs from" in line]
    assert line.endswith(expected)
    assert str(result.report["difference"]).endswith(expected)
    assert run(edited, launch).report["difference"] is None, "only the job that trained the run states it"


@pytest.mark.parametrize("update", [{"checkpoint_every": 3}, {"sample_every": 4}], ids=str)
def test_preview_and_checkpoint_intervals_do_not_start_a_new_run(
    trained: Project, update: dict[str, Any]
) -> None:
    assert not run(trained.changed("output", **update), InProcessLaunch()).report["launched"]


def test_more_steps_resume_a_run_if_the_schedule_does_not_depend_on_them(trained: Project) -> None:
    launch = InProcessLaunch()
    longer = run(trained.changed("output", steps=6), launch)
    assert longer.report["resumed_from"] == 4
    assert len(run_folders(trained)) == 1
    shorter = run(trained, launch)
    assert shorter.report["resumed_from"] == 4
    assert shorter.report["steps"] == 4


def test_fewer_steps_publish_the_lora_that_a_checkpoint_has_saved(
    make_project: Callable[..., Project],
) -> None:
    previews = {"sample_every": 2, "sample_prompts": [{"prompt": "a cat", "steps": 2}]}
    project = make_project(checkpoint_every=1, **previews)
    launch, log = InProcessLaunch(), list[str]()
    run(project, launch)
    (folder,) = run_folders(project)

    # The optimizer's state of these steps is gone: only the newest two checkpoints keep theirs.
    lora = project.recipe.output_dir / "lora"
    for steps in (4, 2):
        shorter = project.changed("output", steps=steps)
        result = run(shorter, launch, log)
        assert len(launch.job_files) == 1, "nothing is trained"
        assert any(f"has saved the LoRA of step {steps}: nothing is trained" in line for line in log)
        assert (result.report["steps"], result.report["from_checkpoint"], result.report["launched"]) == (
            steps,
            True,
            False,
        )
        for name in FILES:
            if name.endswith(".safetensors"):
                saved = folder / "checkpoints" / f"step-{steps:08d}" / name
                assert (lora / name).read_bytes() == saved.read_bytes()
        record = json.loads((lora / "provenance.json").read_text())
        assert (record["step"], record["steps"], record["recipe"]["training"]["steps"]) == (steps,) * 3
        assert f"| steps | {steps}, " in (lora / "README.md").read_text()
        assert (lora / "samples.jpg").read_bytes() == preview_sheet(
            read_previews(folder / "samples", last_step=steps)
        )
        context = CheckContext(shorter.recipe, Tables(shorter.recipe.output_dir))
        failed = {each.name: each.summary for each in trained_lora.run(context) if not each.passed}
        assert failed == {}
        again = run(shorter, launch)
        assert (again.report["launched"], again.report["from_checkpoint"]) == (False, False)

    # The same LoRA as that of a training with so few steps.
    alone = project.changed("alone", steps=2)
    run(alone, InProcessLaunch())
    for name in FILES:
        if name.endswith(".safetensors"):
            trained_alone = load_file(alone.recipe.output_dir / "lora" / name)
            assert differing_tensors(load_file(lora / name), trained_alone) == []

    # The last step of the longer run is a checkpoint too.
    assert run(project, launch).report["from_checkpoint"]
    assert len(launch.job_files) == 1
    assert json.loads((lora / "provenance.json").read_text())["step"] == 6


def test_fewer_steps_are_trained_if_the_saved_lora_is_damaged_or_the_rate_depends_on_the_steps(
    make_project: Callable[..., Project],
) -> None:
    project, launch, log = make_project(steps=4, checkpoint_every=1), InProcessLaunch(), list[str]()
    run(project, launch)
    (folder,) = run_folders(project)

    # Damaged files are not published.
    file = folder / "checkpoints" / "step-00000002" / "demo_kohya.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert run(project.changed("output", steps=2), launch).report["launched"]

    run(project.changed("linear", lr_scheduler="linear"), launch)
    shorter = run(project.changed("linear", lr_scheduler="linear", steps=2), launch)
    assert (shorter.report["launched"], shorter.report["resumed_from"]) == (True, 0)

    # Without the record of a finished run, the log names the command that publishes the saved LoRA.
    stopped = project.changed("stopped", steps=6)
    launch.stop_after = 4
    with pytest.raises(LaunchError):
        run(stopped, launch)
    launch.stop_after = None
    assert run(project.changed("stopped", steps=2), launch, log).report["launched"]
    assert any("latentline export demo --step 2 publishes" in line for line in log)
