"""Runs of tests: trained in this process, with a report or a launcher that can stop them early."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.errors import LaunchError
from pipeline.trained_lora.job import TrainingJob, read_job
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.stage import train_lora
from pipeline.trained_lora.worker.loop import train
from pipeline.trained_lora.worker.stop_request import StopRequest

if TYPE_CHECKING:
    from conftest import Project

    from pipeline.reporting.reports import StageResult

FILES = [
    "demo_comfyui.safetensors",
    "demo_kohya.safetensors",
    "provenance.json",
    "pytorch_lora_weights.safetensors",
]


class InProcessLaunch:
    """A launcher that trains in this process, records its launches, and can stop early."""

    def __init__(self) -> None:
        self.launched: list[Path] = []
        self.stop_after: int | None = None

    def __call__(self, module: str, job_file: Path) -> None:
        assert module == "pipeline.trained_lora.worker"
        self.launched.append(job_file)
        self._stop = StopRequest()
        if not train(read_job(job_file), self, self._stop):
            raise LaunchError("stopped", where=module, fix="start again")

    def info(self, text: str) -> None: ...

    def phase(self, text: str) -> None: ...

    def progress(self, completed: int, total: int, text: str, **details: str) -> None:
        if self.stop_after is not None and completed >= self.stop_after:
            self._stop.requested = True


def run(project: Project, launch: InProcessLaunch, log: list[str] | None = None) -> StageResult:
    append_line = (log if log is not None else []).append
    return train_lora(project.recipe, project.latents, project.text, launch=launch, log=append_line)


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
    """A request that arrives during the first step: after `requested` was read once."""

    def __init__(self) -> None:
        self._looks = 0

    @property
    def requested(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._looks += 1
        return self._looks > 1


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
