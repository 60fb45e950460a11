"""Validation loss: the error on the holdout with fixed noise at fixed levels, comparable between runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import broadcast_object_list

from pipeline.storage.atomic import write_text
from pipeline.trained_lora.plan.steps import Slot
from pipeline.trained_lora.previews import preview_file
from pipeline.trained_lora.run_folder import RunLayout, read_metrics
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.micro_input import MicroInput

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.models.worker.family import WorkerFamily
    from pipeline.trained_lora.inputs import TrainingInputs
    from pipeline.trained_lora.job import TrainingJob
    from pipeline.trained_lora.worker.engine import Engine

NOISE_LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Noise levels of the measurement: the centres of five equal ranges of the base model's schedule."""

_TRIED_FILE = "tried_again.txt"
"""File in the run's folder with the step whose missing results were tried last."""


@dataclass(frozen=True)
class ValidationLoss:
    """Mean squared errors.

    Attributes:
        by_level: Mean over the variants at each of `NOISE_LEVELS`.
        by_variant: Mean over the levels, by variant_id.
    """

    mean: float
    by_level: tuple[float, ...]
    by_variant: dict[str, float]


class Validation:
    """Measures an engine's loss on variants with their first caption, unmirrored."""

    def __init__(
        self,
        job: TrainingJob,
        family: WorkerFamily,
        samples: TrainingInputs,
        *,
        noise_of: Sequence[str] | None = None,
    ) -> None:
        """Read nothing; `noise_of` has the identity that decides each sample's noise, its own by default."""
        # The base model's own scheduler, so that the recipe's changes do not change the measure.
        self._noise_scheduler: Any = family.noise.load_scheduler()
        self._maker = MicroBatchMaker(job, family, self._noise_scheduler)
        self._variant_ids: list[str] = samples.table["variant_id"].to_list()
        self._noise_of = samples.identities.to_list() if noise_of is None else list(noise_of)

        # A cell is one (variant, level) pair; cell i is level i % 5 of variant i // 5. A batch has one
        # bucket, one scale of the LoRA, and references of one number and shape.
        num_levels = len(NOISE_LEVELS)
        groups = zip(samples.table["bucket"], samples.lora_scales, samples.reference_shapes, strict=True)
        cells_by_group: defaultdict[tuple[str, int, str], list[int]] = defaultdict(list)
        for index, group in enumerate(groups):
            cells_by_group[group] += range(index * num_levels, (index + 1) * num_levels)
        size = job.recipe.training.batch_size
        self._batches = [
            cells[start : start + size]
            for _, cells in sorted(cells_by_group.items())
            for start in range(0, len(cells), size)
        ]

    def loss(self, engine: Engine) -> ValidationLoss:
        """Return the current loss; every rank must call it at the same steps, and gets the same value."""
        accelerator = engine.accelerator
        rank, num_ranks = accelerator.process_index, accelerator.num_processes
        errors = torch.zeros(len(self._variant_ids) * len(NOISE_LEVELS), device=accelerator.device)
        for micro in self._inputs(self._batches[rank::num_ranks]):
            errors[micro.indices.to(errors.device)] = engine.objective.errors(micro, self._noise_scheduler)
        if engine.is_sharded and rank >= len(self._batches) % num_ranks > 0:
            # This rank has one batch less than others, and must run the model as often.
            for micro in self._inputs(self._batches[:1]):
                engine.objective.errors(micro, self._noise_scheduler)

        # Each cell is nonzero on one rank only.
        summed = cast("Tensor", accelerator.reduce(errors, reduction="sum"))
        table = summed.double().cpu().view(len(self._variant_ids), len(NOISE_LEVELS))
        by_variant: list[float] = table.mean(dim=1).tolist()
        return ValidationLoss(
            mean=float(table.mean()),
            by_level=tuple(table.mean(dim=0).tolist()),
            by_variant=dict(zip(self._variant_ids, by_variant, strict=True)),
        )

    def _inputs(self, batches: Sequence[Sequence[int]]) -> Iterator[MicroInput]:
        num_levels = len(NOISE_LEVELS)
        for cells in batches:
            share = tuple(
                Slot(self._variant_ids[cell // num_levels], cell, epoch=0, occurrence=0, drop_caption=False)
                for cell in cells
            )
            levels = [NOISE_LEVELS[cell % num_levels] for cell in cells]
            noise_of = [self._noise_of[cell // num_levels] for cell in cells]
            yield self._maker.make_fixed(share, levels, noise_of=noise_of)


@dataclass(frozen=True)
class MissingResults:
    """Results that are missing at one step."""

    validation: bool
    previews: bool


ALL_MISSING = MissingResults(validation=True, previews=True)
"""Results of a step that has just been trained."""


def missing_results(job: TrainingJob, step: int, *, is_main: bool) -> MissingResults:
    """Return the results that are missing on the main process after `step` steps, due or not.

    Every rank calls it.
    """
    # The holdout or the prompts may differ from an earlier start.
    if step == 0:
        return ALL_MISSING

    # All ranks take part in a validation and need the same answer, but other machines lack the files.
    shared: list[Any] = [_missing_on_disk(job, step) if is_main else None]
    broadcast_object_list(shared)
    return shared[0]


def _missing_on_disk(job: TrainingJob, step: int) -> MissingResults:
    layout = RunLayout(job.folder)
    tried = layout.folder / _TRIED_FILE

    # One further attempt only: if these results kill the process, for example because memory runs out, the
    # run must not end at this step again and again.
    if tried.is_file() and tried.read_text(encoding="utf-8") == str(step):
        return MissingResults(validation=False, previews=False)

    # Written before the attempt, so that a process that dies in it does not try again.
    write_text(tried, str(step))

    # A checkpoint is saved before the validation and the previews of its step, so a process that is killed
    # between them leaves a checkpoint without these results.
    measured_steps = {line["step"] for line in read_metrics(layout.validation, step + 1)}
    files = [preview_file(layout.previews, step, number) for number in range(len(job.prompts))]
    return MissingResults(
        validation=step not in measured_steps,
        previews=not all(file.is_file() for file in files),
    )
