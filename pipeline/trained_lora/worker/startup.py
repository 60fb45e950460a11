"""The phases of a training run before its first step, for its progress: "loading the transformer (3/7)"."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipeline.models.families import detect
from pipeline.trained_lora.run_folder import RunLayout, checkpoint_list

if TYPE_CHECKING:
    from pipeline.trained_lora.job import TrainingJob

Report = Callable[[str], object]
"""Receives each phase when it begins."""

IMPORTS = "importing torch"
TEXT_ENCODERS = "loading the text encoders"
ADAPTER = "adding the LoRA"
PREFLIGHT = "testing checkpoint and export"
RESUME = "loading the checkpoint"
VALIDATION = "measuring the validation loss before training"
PREVIEWS = "drawing previews before training"


def report_nothing(_phase: str) -> None:
    """Ignore a phase; for an engine outside of a run."""


class Startup:
    """Reports the phases of one run's start with their number and total.

    Attributes:
        base: Phase in which the base model is loaded, such as "loading the transformer".
        trial: Phase of the trial step, which also compiles the model if `training.compile` is true.
        first_step: Phase of the first step, which compiles the model if a resumed run had no trial step.
    """

    def __init__(self, job: TrainingJob, report: Report) -> None:
        """Find the phases of `job`."""
        training = job.recipe.training
        denoiser = "UNet" if detect(job.base).spec.denoiser_name == "unet" else "transformer"
        self.base = f"loading the {denoiser}"

        # Only counted: verifying checkpoints needs torch, and its import is the first phase.
        resumes = bool(checkpoint_list(RunLayout(job.folder)))
        compiles = training.compile is True  # auto is resolved later, and its log line says so
        self.trial = "compiling and trial step" if compiles else "trial step"
        self.first_step = "compiling and first step" if compiles and resumes else "first step"
        self._report = report

        validates = training.validate_every > 0 and bool(job.inputs.held_out)
        applies = {
            IMPORTS: True,
            self.base: True,
            ADAPTER: True,
            TEXT_ENCODERS: training.lora.text_encoders is not None,
            RESUME: resumes,
            self.trial: not resumes,
            PREFLIGHT: not resumes,
            VALIDATION: validates and not resumes,
            PREVIEWS: training.sample_every > 0 and not resumes,
            self.first_step: True,
        }
        self._phases = [phase for phase, applied in applies.items() if applied]

    def begin(self, phase: str) -> None:
        """Report the start of a phase."""
        # A damaged checkpoint leads to phases that `__init__` did not foresee; these have no number.
        number = f" ({self._phases.index(phase) + 1}/{len(self._phases)})" if phase in self._phases else ""
        self._report(f"{phase}{number}")
