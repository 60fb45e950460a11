"""Runs of tests: trained in this process, with a report or a launcher that can stop them early."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline.cache.store import Store
from pipeline.errors import LaunchError
from pipeline.processes.launch import Meanwhile
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.trained_lora.stage import train_lora
from pipeline.trained_lora.worker.checkpoint import checkpoint_path, load_checkpoint
from pipeline.trained_lora.worker.loop import train
from pipeline.trained_lora.worker.stop_request import StopRequest
from tests.in_process_worker import InProcessLaunch

if TYPE_CHECKING:
    from pipeline.reporting.reports import StageResult
    from tests.pipeline.trained_lora.project import Project

FILES = [
    "demo_comfyui.safetensors",
    "demo_kohya.safetensors",
    "provenance.json",
    "pytorch_lora_weights.safetensors",
]


def run(project: Project, launch: InProcessLaunch, log: list[str] | None = None) -> StageResult:
    append_line = (log if log is not None else []).append
    return train_lora(project.recipe, project.latents, project.text, launch=launch, log=append_line)


class _NoLaunch(InProcessLaunch):
    def __call__(self, module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
        raise LaunchError("not started", where=module, fix="start it")


def begin(project: Project) -> list[str]:
    """Run the training up to the launch of its process, which fails; return the lines of its log."""
    log: list[str] = []
    with pytest.raises(LaunchError, match="not started"):
        run(project, _NoLaunch(), log)
    return log


def run_folders(project: Project) -> list[Path]:
    return sorted(path.parent for path in project.recipe.output_dir.glob("runs/*/run.json"))


@dataclass
class RecordingReport:
    """A report that keeps its lines, and requests a stop or calls `act` after `stop_after` steps."""

    stop: StopRequest = field(default_factory=StopRequest)
    stop_after: int = 10**9
    lines: list[str] = field(default_factory=list)
    act: Callable[[], None] | None = None

    def info(self, text: str) -> None:
        self.lines.append(text)

    def phase(self, text: str) -> None: ...

    def progress(self, done: int, total: int, text: str, **details: str) -> None:
        self.lines.append(f"{done}/{total} {text}")
        if self.act is not None and done >= self.stop_after:
            self.act()
        elif done + 1 >= self.stop_after:
            self.stop.requested = True


class StopDuringFirstStep(StopRequest):
    """A request that arrives during the first step: after it was looked for once."""

    num_looks = 0

    def poll(self) -> bool:
        self.num_looks += 1
        self.requested = self.num_looks > 1
        return self.requested


def run_until(job: TrainingJob, stop_after: int = 10**9, *, start: int = 0) -> tuple[bool, list[str]]:
    """Train a run with `start` steps done until `stop_after` steps are done."""
    if stop_after == start + 1:
        report = RecordingReport()
        return train(job, report, StopDuringFirstStep()), report.lines
    report = RecordingReport(stop_after=stop_after)
    if stop_after <= start:
        report.stop.requested = True
    return train(job, report, report.stop), report.lines


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(each.numpy().tobytes()).hexdigest() for name, each in tensors.items()}


def steps_kept(job: TrainingJob) -> list[int]:
    markers = RunLayout(job.folder).checkpoints.glob("*/COMPLETE")
    return sorted(int(marker.parent.name.removeprefix("step-")) for marker in markers)


@dataclass(frozen=True)
class Outcome:
    """Everything that a run computed: its metrics by step and sample, and its weights."""

    steps: list[Any]
    samples: list[Any]
    adapter: dict[str, str]
    exported: dict[str, str]
    validation: list[Any]


def outcome(job: TrainingJob) -> Outcome:
    layout, plan = RunLayout(job.folder), job.plan()
    steps = read_metrics(layout.metrics, len(plan))
    assert [line["step"] for line in steps] == list(range(len(plan)))
    samples = read_metrics(layout.sample_losses, len(plan))
    state = load_checkpoint(checkpoint_path(layout.checkpoints, len(plan)), job.run)
    return Outcome(
        [[line[name] for name in ("step", "epoch", "loss", "learning_rate", "grad_norm")] for line in steps],
        [
            [
                (slot.variant_id, line["timesteps"][slot.index], line["losses"][slot.index])
                for slot in step.slots()
            ]
            for line, step in zip(samples, plan, strict=True)
        ],
        bits(state.adapter),
        bits(load_file(layout.exported / "pytorch_lora_weights.safetensors")),
        [(line["step"], line["loss"]) for line in read_metrics(layout.validation, len(plan) + 1)],
    )


def poisoned(job: TrainingJob) -> tuple[TrainingJob, str]:
    """Return the job with a NaN latent in one sample after the first two steps, and that sample's id."""
    drawn_samples = {slot.variant_id for step in job.plan()[:2] for slot in step.slots()}
    chosen = next(item for item in job.inputs if item.variant_id not in drawn_samples)
    store, entry = Store(job.recipe.cache_dir), chosen.views[0].entry
    path, (latent,) = store.path(entry), entry.tensors.values()
    odd = np.full(latent.shape, np.nan, latent.dtype).tobytes()
    path.write_bytes(path.read_bytes()[: -len(odd)] + odd)
    return job, chosen.variant_id
