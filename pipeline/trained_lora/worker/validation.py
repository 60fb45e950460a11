"""The loss on given samples at fixed noise levels with fixed noise: two numbers of it can be compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from pipeline.trained_lora.plan.steps import Slot
from pipeline.trained_lora.worker.loader import MicroBatchMaker, MicroInput

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.models.worker.family import WorkerFamily
    from pipeline.trained_lora.job import TrainingJob
    from pipeline.trained_lora.samples import TrainingInputs
    from pipeline.trained_lora.worker.engine import Engine

LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of each sample: the middles of five equal ranges, by the base model's own noise schedule."""


@dataclass(frozen=True)
class ValidationLoss:
    """Mean squared errors.

    Attributes:
        mean: Over samples and levels.
        by_level: Over the samples, at each of `LEVELS`.
        by_sample: Over the levels, by variant_id.
    """

    mean: float
    by_level: tuple[float, ...]
    by_sample: dict[str, float]


class Validation:
    """Measures the loss of an engine's adapter on samples with their first caption, as they are."""

    def __init__(self, order: TrainingJob, family: WorkerFamily, samples: TrainingInputs) -> None:
        """Plan the batches; every rank has to make one, and to call `loss` when the others do.

        Args:
            order: Names the store and the batch size.
            family: Gives levels their timesteps.
            samples: At least one, of the order's.
        """
        self._scheduler: Any = family.noise.load_scheduler()
        self._maker = MicroBatchMaker(order, family, self._scheduler)
        self._names: list[str] = samples.table["variant_id"].to_list()
        by_bucket: defaultdict[str, list[int]] = defaultdict(list)
        for place, bucket in enumerate(samples.table["bucket"]):
            by_bucket[bucket] += range(place * len(LEVELS), (place + 1) * len(LEVELS))
        size = order.recipe.training.batch_size
        self._batches = [
            places[start : start + size]
            for _, places in sorted(by_bucket.items())
            for start in range(0, len(places), size)
        ]

    def loss(self, engine: Engine) -> ValidationLoss:
        """The loss by now; batches are shared among the ranks, and all get the same answer.

        Raises:
            StoreError: An entry is missing or damaged.
        """
        accelerator = engine.accelerator
        errors = torch.zeros(len(self._names) * len(LEVELS), device=accelerator.device)
        for micro in self._inputs(accelerator.process_index, accelerator.num_processes):
            errors[micro.indices.to(errors.device)] = engine.errors(micro, self._scheduler)
        summed = cast("Tensor", accelerator.reduce(errors, reduction="sum"))
        table = summed.double().cpu().view(len(self._names), len(LEVELS))
        by_sample: list[float] = table.mean(dim=1).tolist()
        return ValidationLoss(
            mean=float(table.mean()),
            by_level=tuple(table.mean(dim=0).tolist()),
            by_sample=dict(zip(self._names, by_sample, strict=True)),
        )

    def _inputs(self, rank: int, num_ranks: int) -> Iterator[MicroInput]:
        for places in self._batches[rank::num_ranks]:
            share = tuple(
                Slot(self._names[place // len(LEVELS)], place, epoch=0, occurrence=0, drop_caption=False)
                for place in places
            )
            yield self._maker.make_fixed(share, [LEVELS[place % len(LEVELS)] for place in places])
