"""Metrics of a training run, per step and per sample, as JSON lines and in experiment trackers.

`pipeline.trained_lora.run_folder` describes the files and reads them.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.trained_lora.run_folder import Metrics, RunLayout

if TYPE_CHECKING:
    from pipeline.trained_lora.inputs import TrainingInputs
    from pipeline.trained_lora.plan.steps import StepPlan
    from pipeline.trained_lora.worker.engine import StepOutcome
    from pipeline.trained_lora.worker.paired_validation import PairedLoss
    from pipeline.trained_lora.worker.trackers import Trackers
    from pipeline.trained_lora.worker.validation import ValidationLoss


class JsonLines:
    """A file of JSON lines, open for appending; close it after use."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        if self._file.tell() > 0:
            with path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                ends_in_newline = file.read(1) == b"\n"

            # A killed process can leave half a line. The next line must not become a part of it.
            if not ends_in_newline:
                self._file.write(b"\n")

    def append(self, line: Metrics) -> None:
        """Write a line; readers see it immediately."""
        self._file.write(json.dumps(line).encode("utf-8") + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Flush the file to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MetricsLog:
    """All metrics of one run, written by its main process; close it after use."""

    def __init__(self, layout: RunLayout, inputs: TrainingInputs, trackers: Trackers) -> None:
        """Open the run's files for appending."""
        self._trackers = trackers
        self._trained = inputs.trained
        self._metrics = JsonLines(layout.metrics)
        self._samples = JsonLines(layout.sample_losses)
        self._validation = JsonLines(layout.validation)
        self._files = (self._metrics, self._samples, self._validation)

    def step(self, batch: StepPlan, outcome: StepOutcome, seconds: float) -> None:
        """Log an optimizer step that took `seconds`."""
        numbers = {
            "loss": outcome.loss,
            "learning_rate": outcome.learning_rate,
            "grad_norm": outcome.grad_norm,
            "seconds": round(seconds, 4),
            "memory_bytes": peak_memory_bytes(),
        }
        counts = {"step": batch.step, "epoch": batch.epoch, "samples": batch.num_samples}
        self._metrics.append({**counts, **numbers})

        # Indices instead of ids keep the file small: it has an entry for each sample of each step.
        slots = batch.slots()
        by_sample = {
            "samples": [self._trained.number_of(slot.variant_id) for slot in slots],
            "timesteps": [outcome.timesteps[slot.index] for slot in slots],
            "losses": [outcome.losses[slot.index] for slot in slots],
        }
        self._samples.append({"step": batch.step, **by_sample})

        # A clock of low resolution may measure 0 seconds.
        samples_per_second = batch.num_samples / max(seconds, 1e-9)
        self._trackers.log({**numbers, "samples_per_second": samples_per_second}, step=batch.step + 1)

    def validation(self, steps_done: int, loss: ValidationLoss, paired: PairedLoss | None) -> None:
        """Log a validation loss measured after `steps_done` steps, and that of the pairs if there are any."""
        pairs = {} if paired is None else {"trained_loss": paired.trained, "gap": paired.gap}
        by_image = list(loss.by_variant.values())
        line = {"step": steps_done, "loss": loss.mean, "by_level": loss.by_level, "by_image": by_image}
        self._validation.append({**line, **pairs})
        gap = {} if paired is None else {"validation_gap": paired.gap}
        self._trackers.log({"validation_loss": loss.mean, **gap}, step=steps_done)

    def previews(self, steps_done: int, files: Sequence[Path]) -> None:
        """Log previews drawn after `steps_done` steps."""
        self._trackers.log_previews(files, step=steps_done)

    def sync(self) -> None:
        """Flush all files to disk."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()


def peak_memory_bytes() -> int:
    """Return the peak memory of this process so far: the GPU's if one is used, otherwise the host's."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()

    # macOS counts it in bytes, Linux in KiB.
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
