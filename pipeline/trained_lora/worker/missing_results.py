"""The validation loss and previews that a run lacks at the step from which it resumes.

A checkpoint is saved before the validation and the previews of its step. A process that is killed between
them leaves a checkpoint without these results. They are tried once more: if they are what kills the process,
for example because memory runs out, the run must not end at this step again and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list

from pipeline.storage.atomic import write_text
from pipeline.trained_lora.previews import preview_file
from pipeline.trained_lora.run_folder import RunLayout, read_metrics

if TYPE_CHECKING:
    from pipeline.trained_lora.job import TrainingJob


_TRIED_FILE = "tried_again.txt"
"""File in the run's folder with the step whose missing results were tried last."""


@dataclass(frozen=True)
class MissingResults:
    """Results that are missing at one step.

    Attributes:
        validation: Whether the step's validation loss is missing.
        previews: Whether a preview of the step is missing.
    """

    validation: bool
    previews: bool


ALL_MISSING = MissingResults(validation=True, previews=True)
"""Results of a step that has just been trained."""


def missing_results(job: TrainingJob, step: int, *, is_main: bool) -> MissingResults:
    """Return the results that are missing on the main process after `step` steps, due or not.

    After a second attempt at them, none counts as missing. Before the first step, everything counts as
    missing, because the holdout or prompts may differ from those of an earlier start.

    Every rank calls it and gets the same answer, because all of them take part in a validation. Other
    machines may lack the main process's files.
    """
    if step == 0:
        return ALL_MISSING
    shared: list[Any] = [_missing_on_disk(job, step) if is_main else None]
    broadcast_object_list(shared)
    return shared[0]


def _missing_on_disk(job: TrainingJob, step: int) -> MissingResults:
    layout = RunLayout(job.folder)
    tried = layout.folder / _TRIED_FILE
    if tried.is_file() and tried.read_text(encoding="utf-8") == str(step):
        return MissingResults(validation=False, previews=False)
    write_text(tried, str(step))

    measured_steps = {line["step"] for line in read_metrics(layout.validation, step + 1)}
    files = [preview_file(layout.samples, step, number) for number in range(len(job.prompts))]
    return MissingResults(
        validation=step not in measured_steps,
        previews=not all(file.is_file() for file in files),
    )
