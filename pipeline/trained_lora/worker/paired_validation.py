"""The loss of trained images with the noise of held-out ones, which shows what a run has memorised.

A trained image and a held-out one of the same dataset and bucket are a pair: their loss is measured with the
same noise at the same levels. The gap of their losses at step 0 is chance, because some images are harder
than others. What is added to it during training is memorised.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.trained_lora.inputs import TrainingInputs
from pipeline.trained_lora.worker.validation import Validation, ValidationLoss

if TYPE_CHECKING:
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.trained_lora.job import TrainingJob
    from pipeline.trained_lora.worker.engine import Engine

MAX_PAIRS = 32
"""Maximum number of pairs. Up to this number of held-out images, pairs double the time of a validation."""


@dataclass(frozen=True)
class PairedLoss:
    """Mean squared errors of the pairs.

    Attributes:
        trained: Mean over the trained images.
        gap: Mean over the held-out images of the pairs, minus `trained`.
    """

    trained: float
    gap: float


class PairedValidation:
    """Measures an engine's loss on the trained images of the pairs."""

    def __init__(self, job: TrainingJob, family: WorkerFamily) -> None:
        held_out, trained = job.inputs.held_out, job.inputs.trained
        self.pairs = pairs_of(held_out, trained)
        self._held_out = [held_out.table["variant_id"][left] for left, _ in self.pairs]
        samples = TrainingInputs(trained.table[[right for _, right in self.pairs]])
        noise_of = [held_out.identities[left] for left, _ in self.pairs]
        self._validation = Validation(job, family, samples, noise_of=noise_of)

    def loss(self, engine: Engine, held_out: ValidationLoss) -> PairedLoss | None:
        """Return the current loss, or None without pairs; every rank must call it at the same steps.

        `held_out` is the loss of the same weights on all held-out images.
        """
        if not self.pairs:
            return None
        trained = self._validation.loss(engine).mean
        losses = [held_out.by_variant[name] for name in self._held_out]
        return PairedLoss(trained, sum(losses) / len(losses) - trained)


def pairs_of(held_out: TrainingInputs, trained: TrainingInputs) -> list[tuple[int, int]]:
    """Return the indices of the paired inputs, up to `MAX_PAIRS`; each input is in one pair at most.

    Both inputs of a pair have one dataset, bucket, scale and shape of references. The order of the inputs,
    which depends on their contents, decides who is paired.
    """
    numbers: defaultdict[tuple[str, ...], deque[int]] = defaultdict(deque)
    for number, group in enumerate(_groups(trained)):
        numbers[group].append(number)
    matched = (
        (number, numbers[group].popleft()) for number, group in enumerate(_groups(held_out)) if numbers[group]
    )
    return list(matched)[:MAX_PAIRS]


def _groups(inputs: TrainingInputs) -> Iterator[tuple[str, ...]]:
    table = inputs.table
    yield from zip(
        table["dataset"], table["bucket"], map(str, inputs.lora_scales), inputs.reference_shapes, strict=True
    )
