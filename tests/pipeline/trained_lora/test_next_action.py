"""What `next_action` says is what the training then does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.log import discard
from pipeline.trained_lora.duration import expected_duration
from pipeline.trained_lora.next_action import NextAction, next_action
from pipeline.trained_lora.recipe_facts import will_train
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.stage import plan_run
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.runs import run, run_folders

if TYPE_CHECKING:
    from pipeline.trained_lora.job import TrainingJob
    from tests.pipeline.trained_lora.project import Project

Make = Callable[..., "Project"]


def planned(project: Project) -> tuple[TrainingJob, NextAction]:
    job, facts, samples = plan_run(RecipeEntries(project.recipe), project.latents, project.text, log=discard)
    return job, next_action(job, facts, samples)


def trained_steps(project: Project, log: list[str] | None = None) -> tuple[int, int]:
    """Run the training, and return the steps that it did and the step at which it began."""
    launch = InProcessLaunch()
    report = run(project, launch, log).report
    first = report["resumed_from"] if launch.job_files else report["steps"]
    return report["steps"] - first, first


@pytest.mark.parametrize(
    ("after", "kind", "first_step", "reason"),
    [
        pytest.param({}, "finished", 6, "", id="unchanged"),
        pytest.param({"steps": 8}, "resume", 6, "it has finished with 6 steps", id="longer"),
        pytest.param({"steps": 4}, "publish", 4, "", id="shorter"),
        pytest.param(
            {"steps": 3},
            "restart",
            0,
            "it has finished with 6 steps, and no checkpoint up to step 3 has its optimizer state, "
            "see training.keep_checkpoints",
            id="between",
        ),
        pytest.param({"seed": 8}, "new", 0, "it differs from {run} in plan.seed 7 -> 8", id="seed"),
    ],
)
def test_the_next_action_is_what_the_training_does(
    finished_once: Make, after: dict[str, Any], kind: str, first_step: int, reason: str
) -> None:
    project = finished_once(checkpoint_every=2)
    old = run_folders(project)[0].name

    changed, log = project.changed("output", **after), list[str]()
    action = planned(changed)[1]
    assert (action.kind, action.first_step, action.reason) == (kind, first_step, reason.format(run=old))
    assert will_train(changed.recipe) == (kind in ("resume", "new"))
    assert trained_steps(changed, log) == (action.steps_left, action.first_step)
    if action.steps_left:
        (line,) = [line for line in log if line.startswith("note: ")]
        assert line.startswith(f"note: {action.work}, about 0:")
        assert line.endswith(f": {action.text().partition(': ')[2]}")


def test_the_next_action_of_a_recipe_without_a_run_is_its_first_run(make_project: Make) -> None:
    project = make_project()
    assert will_train(project.recipe)
    first = planned(project)[1]
    assert (first.kind, first.steps_left, first.reason) == ("new", 6, "it is the first run of this recipe")


def test_a_stopped_run_resumes_at_its_newest_checkpoint_and_restarts_without_one(finished_once: Make) -> None:
    project = finished_once(checkpoint_every=2)
    layout = RunLayout(run_folders(project)[0])
    layout.finished.unlink()
    assert will_train(project.recipe)
    for number in (6, 4):
        folder = layout.checkpoints / f"step-{number:08d}"
        shutil.rmtree(folder)
    (layout.checkpoints / "step-00000002" / "COMPLETE").write_text("{}")
    action = planned(project)[1]
    assert (action.kind, action.first_step, action.reason) == ("resume", 2, "it was stopped")

    (layout.checkpoints / "step-00000002" / "COMPLETE").unlink()
    action = planned(project)[1]
    assert (action.kind, action.first_step) == ("restart", 0)
    assert action.reason == (
        "no checkpoint up to step 6 has its optimizer state, see training.keep_checkpoints"
    )
    assert trained_steps(project) == (6, 0)


def test_a_damaged_lora_is_exported_again_without_a_step(finished_once: Make) -> None:
    project = finished_once(checkpoint_every=2)
    (run_folders(project)[0] / "lora" / "demo_kohya.safetensors").write_bytes(b"torn")
    action = planned(project)[1]
    assert (action.kind, action.steps_left) == ("resume", 0)
    assert action.reason == "its LoRA files are missing or have changed, and are exported again"
    assert trained_steps(project) == (0, 6)


def test_files_at_an_address_decide_like_local_ones(finished_once: Make) -> None:
    project = finished_once(checkpoint_every=2)
    layout = RunLayout(run_folders(project)[0])
    names = [path.relative_to(project.recipe.output_dir).as_posix() for path in layout.folder.rglob("*")]
    # Only the records are on this machine.
    for path in layout.folder.rglob("*.safetensors"):
        path.unlink()
    for path in layout.folder.rglob("COMPLETE"):
        path.unlink()
    for steps, kind, first_step in ((6, "finished", 6), (4, "publish", 4), (8, "resume", 6)):
        changed = project.changed("output", steps=steps)
        entries = RecipeEntries(changed.recipe)
        job, facts, samples = plan_run(entries, changed.latents, changed.text, log=discard)
        action = next_action(job, facts, samples, uploaded=names)
        assert (action.kind, action.first_step) == (kind, first_step)


def test_the_time_of_a_training_is_unknown_until_one_of_its_base_model_was_measured(
    make_project: Make,
) -> None:
    project = make_project()
    entries = RecipeEntries(project.recipe)
    assert expected_duration(entries, *planned(project)) is None
    run(project, InProcessLaunch())
    finished = json.loads((run_folders(project)[0] / "finished.json").read_text())
    took_s = finished["ended_at_s"] - finished["started_at_s"]

    # As long again with another seed, and twice as long with twice the samples in each step.
    again = expected_duration(entries, *planned(project.changed("output", seed=8)))
    assert again is not None
    assert again.seconds == pytest.approx(finished["startup_s"] + took_s)
    assert again.basis == "the last training of this recipe"
    twice = expected_duration(entries, *planned(project.changed("output", gradient_accumulation=4)))
    assert twice is not None
    assert twice.seconds == pytest.approx(finished["startup_s"] + 2 * took_s)

    renamed = project.changed("other")
    renamed.recipe = renamed.recipe.model_copy(update={"name": "other"})
    other = expected_duration(RecipeEntries(renamed.recipe), *planned(renamed))
    assert other is not None
    assert other.basis == "a training of this base model with another recipe"
    assert expected_duration(entries, *planned(project)).seconds == 0  # pyright: ignore[reportOptionalMemberAccess]
