from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import TrainingError
from pipeline.trained_lora.export.lora_files import LAYOUTS, layout_file
from pipeline.trained_lora.inputs import TrainingInputs
from pipeline.trained_lora.job import TrainingJob, read_job
from pipeline.trained_lora.plan.steps import Slot
from pipeline.trained_lora.run_folder import RunLayout, is_being_trained
from pipeline.trained_lora.sample_losses import sample_statistics
from pipeline.trained_lora.worker import before_training, loop
from pipeline.trained_lora.worker.checkpoint import checkpoint_path, load_checkpoint
from pipeline.trained_lora.worker.distributed import STEP_TIMEOUT
from pipeline.trained_lora.worker.engine import QueuedStep
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.loop import train
from pipeline.trained_lora.worker.micro_input import MicroInput
from pipeline.trained_lora.worker.stop_request import StopRequest, stop_on_signals
from tests.pipeline.reference_family import with_references
from tests.pipeline.trained_lora.runs import (
    Outcome,
    RecordingReport,
    bits,
    outcome,
    poisoned,
    run_until,
    steps_kept,
)
from tests.pipeline.trained_lora.slider_project import slider_project

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

TWO_DATASETS: dict[str, dict[str, Any]] = {
    "photos": {"weight": 2.0, "repeats": 2, "validation_fraction": 0.3},
    "studio": {"weight": 1.0},
}
STEPS = 9

Recorded = dict[tuple[int, tuple[int, ...]], str]
"""Hash of the inputs by step and slots."""


def torture_project(make_project: Callable[..., Project], **training: Any) -> Project:
    """Return a project with accumulation, weighted datasets, partial batches, EMA, a schedule and dropout."""
    settings: dict[str, Any] = {"lr_scheduler": "cosine", "warmup_steps": 2, "ema_decay": 0.9, "steps": STEPS}
    settings |= {
        "exhausted": "end_epoch",
        "validate_every": 4,
        "gradient_accumulation": 3,
        "checkpoint_every": 4,
        **training,
    }
    project = make_project(datasets=TWO_DATASETS, **settings)
    steps = list(project.job().plan())
    sizes = {len(share) for step in steps for micro in step.micro_batches for share in micro}
    assert sizes == {1, 2}, "partial batches and uninterrupted ones"
    assert len({len(step.micro_batches) for step in steps}) > 1, "partial windows and uninterrupted ones"
    assert len({step.epoch for step in steps}) > 1
    assert {slot.variant_id.split("/")[0] for step in steps for slot in step.slots()} == set(TWO_DATASETS)
    return project


class Recording(MicroBatchMaker):
    """A maker that records the hash of its inputs and checks that they are the same when built again."""

    recorded_hashes: Recorded

    def make(self, step: int, share: tuple[Slot, ...]) -> MicroInput:
        micro = super().make(step, share)
        references = micro.conditions.get("references", ())
        conditions = [each for each in micro.conditions.values() if isinstance(each, torch.Tensor)]
        parts = [micro.latent, micro.noise, micro.input_noise, micro.timesteps, *conditions, *references]
        digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
        place = (step, tuple(slot.index for slot in share))
        assert self.recorded_hashes.setdefault(place, digest) == digest, f"other inputs in step {step}"
        return micro


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Hashes of the inputs of all runs of this test; building other inputs for the same slots is an error."""
    recorded_hashes: Recorded = {}
    monkeypatch.setattr(Recording, "recorded_hashes", recorded_hashes, raising=False)
    monkeypatch.setattr(loop, "MicroBatchMaker", Recording)
    return recorded_hashes


def cut_and_compare(project: Project, expected: Outcome, cuts: tuple[int, ...]) -> None:
    job = project.changed(f"cut-{'-'.join(map(str, cuts))}").job()
    for start, cut in zip((0, *cuts), cuts, strict=False):
        finished, lines = run_until(job, stop_after=cut, start=start)
        assert not finished
        assert f"stopped on request after {cut} of {STEPS} steps; a checkpoint is saved" in lines
    assert run_until(job)[0]
    assert outcome(job) == expected


def test_R01_a_run_interrupted_before_and_after_checkpoints_equals_the_uninterrupted_run_bit_for_bit(
    make_project: Callable[..., Project], recorded: Recorded
) -> None:
    project = torture_project(make_project)
    uninterrupted = project.changed("uninterrupted").job()
    assert run_until(uninterrupted)[0]
    assert {step for step, _ in recorded} == set(range(STEPS))
    assert [step for step, _ in outcome(uninterrupted).validation] == [0, 4, 8, STEPS]
    cut_and_compare(project, outcome(uninterrupted), (0, 1, 2, 5))


@pytest.mark.slow
def test_R01_an_interrupted_run_with_prior_prediction_and_masks_equals_the_uninterrupted_run_bit_for_bit(
    make_project: Callable[..., Project], recorded: Recorded
) -> None:
    datasets = {"photos": {"mask": {"from": "alpha"}}, "class": {"role": "prior"}}
    settings: dict[str, Any] = {"steps": STEPS, "checkpoint_every": 4, "loss": {"prior": "prediction"}}
    project = make_project(datasets=datasets, **settings)
    uninterrupted = project.changed("uninterrupted").job()
    assert run_until(uninterrupted)[0]
    assert recorded
    cut_and_compare(project, outcome(uninterrupted), (1, 6))


@pytest.mark.slow
def test_R01_an_interrupted_run_of_a_slider_equals_the_uninterrupted_run_bit_for_bit(
    make_project: Callable[..., Project], recorded: Recorded
) -> None:
    project = slider_project(make_project, sizes={"64x64": 4, "32x96": 4}, steps=STEPS, checkpoint_every=4)
    uninterrupted = project.changed("uninterrupted").job()
    assert run_until(uninterrupted)[0]
    assert recorded
    cut_and_compare(project, outcome(uninterrupted), (1, 6))


def test_R01_an_interrupted_run_with_references_equals_the_uninterrupted_run_bit_for_bit(
    make_project: Callable[..., Project], recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_references(monkeypatch)
    datasets = {
        "edits": {"references": [{"path": "/a"}, {"path": "/b"}], "validation_fraction": 0.3},
        "photos": {},
    }
    settings: dict[str, Any] = {"steps": STEPS, "checkpoint_every": 4, "validate_every": 4}
    project = make_project(datasets=datasets, **settings)
    uninterrupted = project.changed("uninterrupted").job()
    assert run_until(uninterrupted)[0]
    assert recorded
    cut_and_compare(project, outcome(uninterrupted), (1, 6))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_R01_runs_interrupted_at_any_one_or_two_steps_equal_the_uninterrupted_run_bit_for_bit(
    make_project: Callable[..., Project], recorded: Recorded
) -> None:
    project = torture_project(make_project)
    uninterrupted = project.changed("uninterrupted").job()
    assert run_until(uninterrupted)[0]
    expected = outcome(uninterrupted)
    for first in range(STEPS):
        cut_and_compare(project, expected, (first,))
        for second in range(first + 1, STEPS):
            cut_and_compare(project, expected, (first, second))


@pytest.mark.slow
def test_sample_losses_stay_with_their_images_when_the_holdout_changes_before_a_resume(
    make_project: Callable[..., Project],
) -> None:
    """The run's id does not depend on the holdout, so the run resumes."""
    held_out = {"photos": {"validation_fraction": 0.4}}
    project = make_project(steps=4, gradient_accumulation=1, datasets=held_out)
    uninterrupted = project.changed("uninterrupted").job()
    assert run_until(uninterrupted)[0]
    expected = sample_statistics(uninterrupted.inputs, RunLayout(uninterrupted.folder), 4)
    first, table = uninterrupted.inputs.held_out[0].variant_id, uninterrupted.inputs.table
    assert first < uninterrupted.inputs.trained[-1].variant_id, "images come after it that are trained on"
    fewer = TrainingInputs(table.filter(table["variant_id"] != first))
    for output, before, after in (
        ("deleted", uninterrupted.inputs, fewer),
        ("added", fewer, uninterrupted.inputs),
    ):
        job = project.changed(output).job()
        assert not run_until(replace(job, inputs=before), stop_after=2)[0]
        assert run_until(replace(job, inputs=after))[0]
        statistics = sample_statistics(after, RunLayout(job.folder), 4)
        assert statistics.equals(expected)


def signalled(job: TrainingJob, number: signal.Signals, after: int, recorded: Recorded) -> int | None:
    """Train in a child process that is signalled after a number of steps; return its exit status.

    The child is forked from a server without threads, because Polars' threads do not survive a fork.
    """
    clean = multiprocessing.get_context("forkserver")
    clean.set_forkserver_preload(["pipeline.trained_lora.worker.loop"])
    threads = torch.get_num_threads()
    child = clean.Process(target=train_signalled, args=(job.write(), number, after, recorded, threads))
    child.start()
    child.join()
    return child.exitcode


def train_signalled(job: Path, number: signal.Signals, after: int, recorded: Recorded, threads: int) -> None:
    torch.set_num_threads(threads)  # results depend on it
    Recording.recorded_hashes, loop.MicroBatchMaker = recorded, Recording
    with stop_on_signals() as stop:
        report = RecordingReport(stop=stop, stop_after=after, act=lambda: os.kill(os.getpid(), number))
        if after == 0:
            os.kill(os.getpid(), number)
        sys.exit(0 if train(read_job(job), report, stop) else 143)


def signal_and_compare(
    project: Project, expected: Outcome, signals: list[tuple[signal.Signals, int]], recorded: Recorded
) -> None:
    """Train a run whose processes get a signal each, after a number of steps."""
    job = project.changed("-".join(f"{number.name}-{steps}" for number, steps in signals)).job()
    for number, steps in signals:
        status = signalled(job, number, steps, recorded)
        assert status == (-signal.SIGKILL if number == signal.SIGKILL else 143)
    assert run_until(job)[0]
    assert outcome(job) == expected


def test_R01_R12_a_signalled_process_ends_with_the_weights_of_an_uninterrupted_run(
    make_project: Callable[..., Project], recorded: Recorded
) -> None:
    project = torture_project(make_project)
    uninterrupted = project.changed("uninterrupted").job()
    assert run_until(uninterrupted)[0]
    signals = [(signal.SIGKILL, 3), (signal.SIGTERM, 5), (signal.SIGKILL, 7)]
    signal_and_compare(project, outcome(uninterrupted), signals, recorded)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_R01_R12_processes_signalled_at_any_one_or_two_steps_end_with_the_weights_of_an_uninterrupted_run(
    make_project: Callable[..., Project],
    recorded: Recorded,
    number: signal.Signals,
) -> None:
    project = torture_project(make_project)
    uninterrupted = project.changed("uninterrupted").job()
    assert run_until(uninterrupted)[0]
    expected = outcome(uninterrupted)
    for first in range(1, STEPS - 1):
        signal_and_compare(project, expected, [(number, first)], recorded)
        for second in range(first + 1, STEPS - 1):
            signal_and_compare(project, expected, [(number, first), (number, second)], recorded)


def test_R05_a_nan_loss_stops_the_run_names_the_sample_and_keeps_the_last_good_lora(
    make_project: Callable[..., Project],
) -> None:
    project = make_project(steps=6, ema_decay=0.5)
    good = project.changed("good", steps=2).job()
    assert run_until(good)[0]
    job, culprit = poisoned(project.changed("poisoned").job())
    with pytest.raises(TrainingError, match="the LoRA after 2 steps is in") as excinfo:
        run_until(job)
    others = {item.variant_id for item in job.inputs} - {culprit}
    assert culprit in excinfo.value.where
    assert [name for name in others if name in excinfo.value.where] == [], excinfo.value.where
    layout = RunLayout(job.folder)
    assert str(layout.last_good) in excinfo.value.what
    for path in sorted(RunLayout(good.folder).exported.iterdir()):
        kept = load_file(layout.last_good / path.name)
        assert bits(kept) == bits(load_file(path))
    assert not layout.result.exists()
    assert load_checkpoint(checkpoint_path(layout.checkpoints, 2), job.run).step == 2


def test_R05_a_failure_to_save_the_last_good_lora_does_not_hide_the_first_error(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, culprit = poisoned(make_project().job())

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(loop, "save_checkpoint", full)
    with pytest.raises(
        TrainingError, match=r"the loss of step 2 must be finite, got nan.*not be saved: no space left"
    ) as excinfo:
        run_until(job)
    assert culprit in excinfo.value.where


def test_running_out_of_memory_during_an_update_saves_and_exports_nothing(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_project().job()
    update, updated_steps = loop.Engine._update, list[int]()

    def half(engine: loop.Engine, step: QueuedStep) -> None:
        if step.batch.step < 2:
            return update(engine, step)
        with torch.no_grad():
            engine.weights[0].add_(1.0)
        updated_steps.append(step.batch.step)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop.Engine, "_update", half)
    with pytest.raises(TrainingError, match="memory ran out in step 2"):
        run_until(job)
    assert updated_steps == [2]
    assert steps_kept(job) == [0]
    assert not RunLayout(job.folder).last_good.exists()


def test_only_the_last_checkpoints_are_kept_and_a_shorter_plan_keeps_later_ones(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = list[int | None]()

    class Counting(loop.Exporter):
        def export(self, *arguments: Any, step: int | None = None) -> Any:
            exported.append(step)
            return super().export(*arguments, step=step)

    monkeypatch.setattr(loop, "Exporter", Counting)
    project = make_project(steps=7, checkpoint_every=2)
    everything = project.changed("everything", keep_checkpoints=None).job()
    assert run_until(everything)[0]
    assert steps_kept(everything) == [0, 2, 4, 6, 7]

    # The pre-flight has no step, and the last step is exported once, for its checkpoint and for the run.
    assert exported == [None, 2, 4, 6, 7]
    layout = RunLayout(everything.folder)
    saved, files = checkpoint_path(layout.checkpoints, 7), sorted(layout.exported.iterdir())
    assert {file.name for file in files} == {layout_file(each, "demo") for each in LAYOUTS}
    for file in files:
        assert file.read_bytes() == (saved / file.name).read_bytes()
        assert file.stat().st_mode == (saved / file.name).stat().st_mode
    two = project.changed("two").job()
    assert two.recipe.training.keep_checkpoints == 2, "the default"
    assert run_until(two)[0]
    assert steps_kept(two) == [6, 7]
    recipe = everything.recipe.model_copy(
        update={"training": everything.recipe.training.model_copy(update={"steps": 5, "keep_checkpoints": 1})}
    )
    shorter = replace(everything, recipe=recipe)
    assert run_until(shorter)[0]
    assert steps_kept(everything) == [5, 6, 7]


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_run_warns_of_packed_weights_without_gradient_checkpointing(
    make_project: Callable[..., Project], *, checkpointing: bool
) -> None:
    job = make_project(steps=1, quantize="int8", gradient_checkpointing=checkpointing).job()
    finished, lines = run_until(job)
    assert finished
    warnings = json.loads(RunLayout(job.folder).result.read_text())["warnings"]
    expected = "quantize: int8 without gradient checkpointing takes more memory than none"
    for places in (warnings, lines):
        assert (expected in "\n".join(places)) == (not checkpointing)


def test_processes_wait_briefly_within_a_step_unless_the_main_process_has_just_saved_alone(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_project(steps=5, checkpoint_every=3, validate_every=0).job()
    events: list[str] = []

    def recorded(kind: Any, name: str, text: Callable[[Any], str]) -> None:
        original = getattr(kind, name)

        def record(*arguments: Any, **options: Any) -> Any:
            events.append(text(arguments))
            return original(*arguments, **options)

        monkeypatch.setattr(kind, name, record)

    monkeypatch.setattr(before_training, "run_trial_step", lambda *arguments: None)
    recorded(loop, "wait_at_most", lambda arguments: "short" if arguments[0] == STEP_TIMEOUT else "long")
    recorded(loop.Engine, "start", lambda arguments: f"step {arguments[1].step}")
    recorded(loop, "save_checkpoint", lambda arguments: f"save {arguments[2].step}")
    assert run_until(job)[0]
    assert ", ".join(each for each in events if each != "save 0") == (
        "long, step 0, long, short, step 1, long, short, step 2, long, save 3, "
        "long, step 3, long, short, step 4, long, save 5"
    )


def test_a_run_counts_as_being_trained_before_its_model_is_loaded(
    make_project: Callable[..., Project],
) -> None:
    """A garbage collection must not delete it in the minutes that a large model takes."""
    job = make_project().job()
    locked: list[bool] = []

    class Report(RecordingReport):
        def phase(self, text: str) -> None:
            locked.append(is_being_trained(RunLayout(job.folder)))
            raise InterruptedError(text)

    with pytest.raises(InterruptedError, match="loading the UNet"):
        train(job, Report(), StopRequest())
    assert locked == [True]
    assert not is_being_trained(RunLayout(job.folder))
