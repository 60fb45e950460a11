"""`evaluation.publish: best`: which step is in lora/ after evaluations, jobs, exports and kills."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.evaluation.choice import Choice
from pipeline.evaluation.prepare import Request
from pipeline.evaluation.publishing import expected_publication, publish_choice
from pipeline.evaluation.stage import evaluate
from pipeline.reporting.reports import write_report
from pipeline.storage.tables import Tables
from pipeline.trained_lora.export.earlier_step import ExportedStep, exported_step, publish_step
from pipeline.trained_lora.next_action import NextAction
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.evaluation.evaluated import evaluated_recipe
from tests.pipeline.trained_lora.project import Project
from tests.pipeline.trained_lora.runs import run, run_folders

if TYPE_CHECKING:
    from pathlib import Path

WHY = "step 2 is the earliest of 2 that is as good as the best, step 4"
CHOSEN = Choice(2, WHY, 4)
UNDECIDED = Choice(None, "not decided: 2 pictures per step cannot tell step 2 from step 4")


@pytest.fixture
def best(trained: Project) -> Project:
    """Return a trained project that publishes the best step; lora/ holds the last one, 4."""
    return Project(evaluated_recipe(trained, publish="best"), trained.latents, trained.text)


def published(project: Project) -> dict[str, bytes]:
    lora = project.recipe.output_dir / "lora"
    return {path.name: path.read_bytes() for path in lora.iterdir()}


def step_in_lora(project: Project) -> int:
    return json.loads(published(project)["provenance.json"])["step"]


def publish(project: Project, choice: Choice, log: list[str] | None = None) -> tuple[int | None, str]:
    lines = log if log is not None else []
    return publish_choice(project.recipe, run_folders(project)[0].name, choice, log=lines.append)


def test_the_chosen_step_is_published_with_its_reason_and_later_jobs_keep_it(best: Project) -> None:
    last, folder = published(best), run_folders(best)[0]
    assert step_in_lora(best) == 4
    step, text = publish(best, CHOSEN)
    assert (step, text) == (2, "lora/ holds step 2, which the evaluation has chosen")

    chosen = published(best)
    assert chosen.keys() == last.keys()
    for name in chosen:
        if name.endswith(".safetensors"):
            assert chosen[name] == (folder / "checkpoints" / "step-00000002" / name).read_bytes()
    record = json.loads(chosen["provenance.json"])
    assert (record["step"], record["run"], record["why"]) == (2, folder.name, WHY)
    assert f"| chosen by its evaluation | {WHY} |" in chosen["README.md"].decode()

    # A job trains nothing, and each of its steps leaves lora/ as it is.
    launch, log = InProcessLaunch(), list[str]()
    assert run(best, launch, log).report["published_step"] == 2
    assert any("step 2" in line and "chosen by its evaluation: unchanged" in line for line in log), log
    publish(best, CHOSEN, log)
    assert log[-1] == "lora/ holds step 2, which the evaluation has chosen: unchanged"
    assert (published(best), launch.modules) == (chosen, [])


def test_an_undecided_evaluation_publishes_the_last_step_and_says_so(best: Project) -> None:
    last = published(best)
    assert publish(best, UNDECIDED) == (4, "lora/ holds step 4, the last one")
    assert published(best) == last
    publish(best, CHOSEN)
    assert publish(best, UNDECIDED) == (4, "lora/ holds step 4, the last one")
    assert published(best) == last


def test_without_the_setting_the_next_job_publishes_the_last_step_again(best: Project) -> None:
    last = published(best)
    publish(best, CHOSEN)
    recipe = best.recipe.model_copy(update={"evaluation": None})
    run(Project(recipe, best.latents, best.text), InProcessLaunch())
    assert published(best) == last


def test_a_step_that_a_person_exported_stays(best: Project) -> None:
    name = run_folders(best)[0].name
    publish_step(best.recipe.output_dir, ExportedStep(name, 4))
    before = published(best)
    step, text = publish(best, CHOSEN)
    assert (step, text) == (
        4,
        "lora/ holds step 4, as exported; latentline export demo --best publishes the chosen step",
    )
    assert published(best) == before
    action = NextAction("finished", name, 4, 4)
    assert "step 4" in (text := expected_publication(best.recipe, action))
    assert "stays in lora/, as exported" in text


@pytest.mark.parametrize("reason", ["gate", "unfinished"])
def test_a_closed_gate_of_the_training_and_a_run_that_has_not_finished_publish_nothing(
    best: Project, reason: str
) -> None:
    if reason == "gate":
        checks = {"checks": [{"name": "loss_finite", "closed": True}, {"name": "loss_fell", "closed": False}]}
        write_report(best.recipe.output_dir, "trained_lora_checks", checks)
        expected = "closed gates of trained_lora: loss_finite"
    else:
        (run_folders(best)[0] / "finished.json").unlink()
        expected = f"run {run_folders(best)[0].name} has not finished"
    before = published(best)
    assert publish(best, CHOSEN) == (None, f"lora/ is unchanged: {expected}")
    assert published(best) == before


def test_a_job_that_is_killed_while_it_publishes_leaves_a_step_that_the_next_job_completes(
    best: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = published(best)
    publish(best, CHOSEN)
    chosen = published(best)
    original, left = os.replace, 0

    def replace(source: Path, target: Path) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        original(source, target)

    kills = 0
    while kills < 50:
        publish(best, UNDECIDED)
        assert published(best) == last
        left = kills
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", replace)
            try:
                publish(best, CHOSEN)
                break
            except KeyboardInterrupt:
                kills += 1
        # The record decides: either nothing has happened yet, or the job completes this step.
        is_recorded = exported_step(best.recipe.output_dir, run_folders(best)[0].name) is not None
        run(best, InProcessLaunch())
        assert published(best) == (chosen if is_recorded else last), f"killed at file {kills}"
    assert kills >= len(chosen), "every file of lora/ is replaced once"


def test_only_the_evaluation_of_the_job_publishes_and_its_report_says_what(best: Project) -> None:
    def evaluated(**request: Any) -> dict[str, Any]:
        tables = Tables(best.recipe.output_dir)
        result = evaluate(
            best.recipe, Request(**request), tables, launch=InProcessLaunch(), log=list[str]().append
        )
        return result.report

    own = evaluated()
    assert own["published_step"] == own["chosen_step"] or 4
    assert own["published"].startswith(f"lora/ holds step {own['published_step']}")
    assert step_in_lora(best) == own["published_step"]

    before = published(best)
    assert "published" not in evaluated(steps=(2,))
    assert published(best) == before


def test_plan_names_the_step_that_would_be_published(best: Project) -> None:
    recipe, name = best.recipe, run_folders(best)[0].name
    finished, new = NextAction("finished", name, 4, 4), NextAction("new", "other", 4)
    open_choice = "the step that the evaluation chooses is published, or else step 4, the last one"
    assert expected_publication(recipe, finished) == open_choice
    write_report(recipe.output_dir, "evaluation", {"run": name, "chosen_step": 2, "why": WHY})
    expected = f"step 2 is published, unless the evaluation changes: {WHY}"
    assert expected_publication(recipe, finished) == expected
    assert expected_publication(recipe, new) == open_choice
    undecided = {"run": name, "chosen_step": None, "why": UNDECIDED.why}
    write_report(recipe.output_dir, "evaluation", undecided)
    expected = f"step 4, the last one, is published: {UNDECIDED.why}"
    assert expected_publication(recipe, finished) == expected
