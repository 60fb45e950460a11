"""Metrics of a run, by step and by sample; `pipeline.trained_lora.run_folder` reads them."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from pipeline.trained_lora.run_folder import Metrics, RunLayout

if TYPE_CHECKING:
    from pipeline.trained_lora.plan.steps import StepPlan
    from pipeline.trained_lora.samples import TrainingInputs
    from pipeline.trained_lora.worker.engine import StepOutcome
    from pipeline.trained_lora.worker.trackers import Tracker
    from pipeline.trained_lora.worker.validation import ValidationLoss


class Lines:
    """Appends lines of JSON to a file; use it as a context."""

    def __init__(self, path: Path) -> None:
        """Open for appending; a line that an earlier process left torn is ended first."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        if self._file.tell() > 0:
            with path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"
            if torn:
                self._file.write(b"\n")

    def append(self, line: Metrics) -> None:
        """Add a line; a reader sees it at once."""
        self._file.write(json.dumps(line).encode("utf-8") + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Bring all lines to the disk; called with each checkpoint, so that no resumed run lacks any."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Lines:
        """These lines."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()


class MetricsLog:
    """The logs of one run, kept by its first rank; use it as a context."""

    def __init__(self, layout: RunLayout, inputs: TrainingInputs, trackers: Sequence[Tracker]) -> None:
        """Open what there is, to go on with it.

        Args:
            layout: Of the run.
            inputs: Of the run; a sample is noted by its number among those that are trained on.
            trackers: Told of everything as well; closed with this.
        """
        self._files = ExitStack()
        self._trackers = list(trackers)
        self._trained = inputs.trained
        for tracker in self._trackers:
            self._files.callback(tracker.close)
        self._metrics = self._files.enter_context(Lines(layout.metrics))
        self._samples = self._files.enter_context(Lines(layout.sample_losses))
        self._validation = self._files.enter_context(Lines(layout.validation))

    def step(self, batch: StepPlan, outcome: StepOutcome, seconds: float) -> None:
        """Note an optimizer step that took so many seconds."""
        numbers = {
            "loss": outcome.loss,
            "learning_rate": outcome.learning_rate,
            "grad_norm": outcome.grad_norm,
            "seconds": round(seconds, 4),
            "memory_bytes": peak_memory_bytes(),
        }
        counts = {"step": batch.step, "epoch": batch.epoch, "samples": batch.num_samples}
        self._metrics.append({**counts, **numbers})
        samples = [self._trained.number_of(slot.variant_id) for slot in batch.slots()]
        drawn = {"samples": samples, "timesteps": outcome.timesteps, "losses": outcome.losses}
        self._samples.append({"step": batch.step, **drawn})
        speed = batch.num_samples / max(seconds, 1e-9)
        for tracker in self._trackers:
            tracker.numbers(batch.step + 1, {**numbers, "samples_per_second": speed})

    def validation(self, done: int, loss: ValidationLoss) -> None:
        """Note a measurement on held-out samples after so many steps."""
        self._validation.append({"step": done, "loss": loss.mean, "by_level": loss.by_level})
        for tracker in self._trackers:
            tracker.numbers(done, {"validation_loss": loss.mean})

    def pictures(self, done: int, files: Sequence[Path]) -> None:
        """Show sample pictures drawn after so many steps."""
        for tracker in self._trackers:
            tracker.pictures(done, files)

    def sync(self) -> None:
        """Bring all that is noted to the disk."""
        for lines in (self._metrics, self._samples, self._validation):
            lines.sync()

    def __enter__(self) -> MetricsLog:
        """This journal."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        self._files.close()


def peak_memory_bytes() -> int:
    """The most memory this process has held so far: of the GPU where it uses one, else of the machine."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
