"""Trials before training: they surface missing memory and a useless training adapter in the first minute."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.errors import TrainingError
from pipeline.trained_lora.worker.training_adapter import refused_adapter

if TYPE_CHECKING:
    from pipeline.trained_lora.inputs import TrainingInputs
    from pipeline.trained_lora.plan.steps import Slot, StepPlan, TrainingPlan
    from pipeline.trained_lora.worker.engine import Engine
    from pipeline.trained_lora.worker.micro_input import MicroInput

_NUM_STEPS = 1000
"""Number of steps from the start of the plan among which the largest is tried."""


def largest_step(plan: TrainingPlan, inputs: TrainingInputs) -> StepPlan:
    """Return the step with the most latent values in one micro-batch of one rank; the first such step.

    Values of references count too, and of all other images that the denoiser sees.

    Only the first `_NUM_STEPS` steps are compared.
    """
    return max((plan[number] for number in range(min(len(plan), _NUM_STEPS))), key=_largest_share(inputs))


def _largest_share(inputs: TrainingInputs) -> Callable[[StepPlan], int]:
    def values(share: tuple[Slot, ...]) -> int:
        # All samples of a micro-batch are from one bucket, and their references have the same shapes.
        view = inputs.named(share[0].variant_id).views[share[0].view]
        return len(share) * sum(
            max(math.prod(tensor.shape) for tensor in entry.tensors.values())
            for entry in (view.entry, *view.images)
        )

    return lambda step: max(values(share) for micro in step.micro_batches for share in micro)


def run_trial_step(
    engine: Engine, step: StepPlan, make_input: Callable[[int, tuple[Slot, ...]], MicroInput]
) -> None:
    """Run one optimizer step and undo it bit for bit; every rank calls it with the same step.

    An error of the step other than missing memory is ignored, because training meets it again and keeps the
    weights from before it.

    Args:
        engine: Engine that has not trained yet.
        step: Step of the plan.
        make_input: `MicroBatchMaker.make`.
    """
    before = engine.state(0)
    before = replace(before, optimizer=copy.deepcopy(before.optimizer))

    def inputs() -> Iterator[tuple[StepPlan, MicroInput]]:
        for micro in step.micro_batches:
            yield step, make_input(step.step, micro[engine.accelerator.process_index])

    with suppress(TrainingError):
        engine.step(step, inputs(), stop=False)
    for weight in engine.weights:
        weight.grad = None  # a step that failed leaves its gradients
    engine.restore(before)


def require_adapter_effect(engine: Engine, micro: MicroInput, training_adapter: Path | None) -> None:
    """Raise TrainingError if the training adapter does not change the loss (FAILURES E05).

    Without a training adapter, nothing is computed.

    Args:
        engine: Engine that has not trained yet.
        micro: Any input.
        training_adapter: File of the training adapter, or None.
    """
    if training_adapter is None:
        return
    micro = micro.to(engine.accelerator.device)
    with engine.evaluation():
        plain = engine.losses(micro, engine.joint_model)
    with engine.evaluation(), engine.training_adapter.applied():
        adapted = engine.losses(micro, engine.joint_model)
    if torch.equal(plain, adapted):
        raise refused_adapter(training_adapter, "it does not change the model's prediction")
