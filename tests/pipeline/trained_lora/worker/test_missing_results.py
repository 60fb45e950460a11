"""A run that is killed after a checkpoint, before its validation and previews, catches up on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.processes.launch import LocalLaunch
from pipeline.trained_lora.previews import preview_file
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker import loop, validation
from pipeline.trained_lora.worker.validation import MissingResults
from tests.pipeline.trained_lora.project import PROMPTS
from tests.pipeline.trained_lora.runs import outcome, run_until

if TYPE_CHECKING:
    from pipeline.trained_lora.job import TrainingJob
    from tests.pipeline.trained_lora.project import Project

EVERY: dict[str, Any] = {
    "steps": 4,
    "validate_every": 2,
    "sample_every": 2,
    "checkpoint_every": 2,
    "sample_prompts": PROMPTS,
    "datasets": {"photos": {"validation_fraction": 0.3}},
}


class Killed(BaseException):
    """The end of a process."""


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Callable[[TrainingJob, str, int], None]:
    """Train a job until a method of the loop is called for a step."""

    def train_until(job: TrainingJob, method: str, step: int) -> None:
        original = getattr(loop._TrainingRun, method)

        def killed(run: Any, steps_done: int, *others: Any) -> None:
            if steps_done == step:
                raise Killed
            original(run, steps_done, *others)

        with monkeypatch.context() as patched, suppress(Killed):
            patched.setattr(loop._TrainingRun, method, killed)
            run_until(job)
            pytest.fail("the run was not killed")

    return train_until


def validated(job: TrainingJob) -> list[int]:
    lines = RunLayout(job.folder).validation.read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def drawn(job: TrainingJob) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(RunLayout(job.folder).previews.glob("*.png"))}


@pytest.mark.slow
@pytest.mark.parametrize("training", [{"ema_decay": 0.9}, {"optimizer": "schedule_free"}], ids=str)
def test_R01_validation_and_previews_that_a_kill_prevented_follow_after_the_resume(
    make_project: Callable[..., Project], kill: Callable[..., None], training: dict[str, Any]
) -> None:
    project = make_project(**EVERY, **training)
    expected = project.changed("uninterrupted").job()
    assert run_until(expected)[0]

    job = project.changed("killed").job()
    for step in (2, 4):
        kill(job, "_validate_and_draw", step)
    assert run_until(job)[0]

    assert validated(job) == validated(expected) == [0, 2, 4]
    assert outcome(job) == outcome(expected)
    assert drawn(job) == drawn(expected)
    assert len(drawn(job)) == 6


def test_only_missing_results_are_computed_after_the_resume(
    make_project: Callable[..., Project], kill: Callable[..., None]
) -> None:
    """A kill while drawing leaves the step's validation loss and its first preview."""
    job = make_project(**EVERY).job()
    kill(job, "_draw", 2)
    assert validated(job) == [0, 2]
    assert run_until(job)[0]
    assert validated(job) == [0, 2, 4]
    assert len(drawn(job)) == 6

    first, second = (preview_file(RunLayout(job.folder).previews, 4, number) for number in (0, 1))
    second.unlink()
    assert run_until(job)[0]
    assert validated(job) == [0, 2, 4]
    assert first.is_file()
    assert second.is_file()


def test_a_run_that_starts_again_at_its_first_step_computes_all_results(
    make_project: Callable[..., Project],
) -> None:
    """The holdout or the prompts may differ from the earlier start."""
    job = make_project(**EVERY).job()
    layout = RunLayout(job.folder)
    for folder in (layout.previews, layout.validation.parent):
        folder.mkdir(parents=True, exist_ok=True)
    layout.validation.write_text('{"step": 0}\n{"step": 2}\n')
    for step in (0, 2):
        for number in range(len(PROMPTS)):
            preview_file(layout.previews, step, number).touch()
    nothing = MissingResults(validation=False, previews=False)
    assert validation.missing_results(job, 2, is_main=True) == nothing
    assert validation.missing_results(job, 0, is_main=True) == validation.ALL_MISSING


@pytest.mark.slow
def test_R09_results_that_end_the_process_again_are_skipped(
    make_project: Callable[..., Project], kill: Callable[..., None]
) -> None:
    """Otherwise a run whose previews use up the memory could not get past their step."""
    job = make_project(**EVERY).job()
    for _ in range(2):
        kill(job, "_draw", 2)
    assert run_until(job)[0]
    assert validated(job) == [0, 2, 4]
    assert sorted(drawn(job)) == sorted(
        preview_file(RunLayout(job.folder).previews, step, number).name
        for step in (0, 4)
        for number in (0, 1)
    )


@pytest.mark.slow
def test_a_resume_from_a_step_at_which_nothing_is_due_computes_no_results(
    make_project: Callable[..., Project],
) -> None:
    job = make_project(**EVERY).job()
    assert not run_until(job, stop_after=3)[0]
    assert run_until(job)[0]
    assert validated(job) == [0, 2, 4]
    assert len(drawn(job)) == 6


def test_other_ranks_get_the_answer_of_the_main_process(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine has its own files, and no process may wait for one that does not validate."""
    job = make_project(**EVERY).job()
    sent = MissingResults(validation=False, previews=True)

    def receive(shared: list[Any]) -> None:
        assert shared == [None], "other ranks must not decide on their own"
        shared[:] = [sent]

    monkeypatch.setattr(validation, "broadcast_object_list", receive)
    assert validation.missing_results(job, 2, is_main=False) == sent


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_processes_agree_on_what_is_missing(make_project: Callable[..., Project]) -> None:
    job = make_project(**EVERY).changed("pair", num_processes=2).job()
    launch = LocalLaunch(job.recipe.accelerate)
    launch("pipeline.trained_lora.worker", job.write())
    layout, expected = RunLayout(job.folder), drawn(job)

    lines = layout.validation.read_text().splitlines(keepends=True)
    layout.validation.write_text("".join(lines[:-1]))
    preview_file(layout.previews, 4, 1).unlink()
    launch("pipeline.trained_lora.worker", job.write())
    assert layout.validation.read_text().splitlines(keepends=True) == lines
    assert drawn(job) == expected
