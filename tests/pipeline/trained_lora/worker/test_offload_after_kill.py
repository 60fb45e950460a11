"""Training with streamed blocks, ended by SIGKILL between two copies of a step, and resumed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from demo.tiny_models import TINY
from pipeline.models.worker.offload import streamed_blocks as module
from pipeline.processes.launch import THREADS_VARIABLE
from pipeline.trained_lora.job import TrainingJob, read_job
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.trained_lora.worker.loop import train
from pipeline.trained_lora.worker.stop_request import StopRequest
from tests.pipeline.models.worker.offload.streamed import KillingStore, PoisoningStore
from tests.pipeline.trained_lora.runs import RecordingReport, outcome, run_until

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

STEPS = 5

# diffusers warns about its own deprecated names.
pytestmark = pytest.mark.filterwarnings("ignore")


def project_of(make_project: Callable[..., Project], **training: Any) -> Project:
    settings = {"gradient_checkpointing": True, "gradient_accumulation": 1, **training}
    return make_project(sizes={"64x64": 4}, steps=STEPS, checkpoint_every=2, **settings)


def train_killed(job_file: Path, num_slots: int, steps: int, copies: int, threads: int) -> None:
    """Train in this process, which ends itself before a copy of the step after `steps` others."""
    torch.set_num_threads(threads)  # results depend on it
    module.host_store, module.NUM_SLOTS = KillingStore, num_slots
    report = RecordingReport(stop_after=steps, act=partial(KillingStore.kill_after, copies))
    train(read_job(job_file), report, StopRequest())


def killed(job: TrainingJob, num_slots: int, steps: int, copies: int) -> int | None:
    """Run `train_killed` in a child process, and return its exit status."""
    clean = multiprocessing.get_context("forkserver")
    clean.set_forkserver_preload(["pipeline.trained_lora.worker.loop"])
    arguments = (job.write(), num_slots, steps, copies, torch.get_num_threads())
    child = clean.Process(target=train_killed, args=arguments)
    child.start()
    child.join()
    return child.exitcode


def kill_and_compare(project: Project, monkeypatch: pytest.MonkeyPatch, copies: int, num_slots: int) -> None:
    resident = project.changed("resident").job()
    assert run_until(resident)[0]

    job = project.changed(f"killed {copies}", offload=0).job()
    assert killed(job, num_slots, 3, copies) == -signal.SIGKILL
    layout = RunLayout(job.folder)
    assert not layout.result.exists()
    assert len(read_metrics(layout.metrics, STEPS)) == 3

    monkeypatch.setattr(module, "host_store", PoisoningStore)
    monkeypatch.setattr(module, "NUM_SLOTS", num_slots)
    assert run_until(job)[0]
    assert outcome(job) == outcome(resident)
    assert json.loads(layout.result.read_text(encoding="utf-8"))["resumed_from"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 4], ids=["in the forward pass", "in the backward pass"])
def test_a_run_killed_between_two_copies_resumes_to_the_same_bits(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    """With one slot, a step copies three of the four blocks in the forward pass, and three in the other."""
    kill_and_compare(project_of(make_project), monkeypatch, copies, num_slots=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "num_slots"),
    [
        ("Stable Diffusion 3 and 3.5", 2),
        ("FLUX.1 dev", 2),
        ("Chroma", 2),
        ("Anima", 1),
        ("Wan 2.1 (image)", 1),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
def test_a_killed_run_of_each_family_resumes_to_the_same_bits(
    make_project: Callable[..., Project],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_bases: dict[str, Path],
    *,
    kind: str,
    num_slots: int,
    checkpointing: bool,
) -> None:
    TINY[kind](tmp_path / "base")
    tiny_bases[kind] = tmp_path / "base"
    project = project_of(make_project, prediction=kind, gradient_checkpointing=checkpointing)
    for copies in (0, 1):
        kill_and_compare(project, monkeypatch, copies, num_slots)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_streamed_training_process_killed_after_each_step_ends_with_the_weights_of_an_uninterrupted_one(
    make_project: Callable[..., Project],
) -> None:
    """The processes are those of a job; each is killed while it computes its next step."""
    project = project_of(make_project)
    resident = project.changed("resident").job()
    assert run_until(resident)[0]
    job = project.changed("killed", offload=0).job()
    command = [sys.executable, "-m", "pipeline.trained_lora.worker", str(job.write())]
    environment = {**os.environ, THREADS_VARIABLE: str(torch.get_num_threads())}
    for steps in (1, 3, 4):
        child = subprocess.Popen(command, env=environment)
        while len(read_metrics(RunLayout(job.folder).metrics, STEPS)) < steps:
            assert child.poll() is None, "the process ended before it was killed"
            time.sleep(0.01)
        child.kill()
        assert child.wait(60) == -signal.SIGKILL
    subprocess.run(command, env=environment, check=True)
    assert outcome(job) == outcome(resident)
