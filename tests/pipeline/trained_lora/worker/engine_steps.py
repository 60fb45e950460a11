"""Single steps of a training engine, without the training process around it."""

from __future__ import annotations

import torch

from pipeline.models.worker.family import load_family
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.plan.steps import StepPlan
from pipeline.trained_lora.worker.engine import Engine, StepOutcome
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.micro_input import MicroInput


def engine_of(job: TrainingJob) -> Engine:
    """Return an engine on the tiny base model of the job."""
    return Engine(job, load_family(job.base))


def inputs_of(job: TrainingJob, engine: Engine, batch: StepPlan) -> list[tuple[StepPlan, MicroInput]]:
    maker = MicroBatchMaker(job, load_family(job.base), engine.noise_scheduler)
    device = engine.accelerator.device
    return [(batch, maker.make(batch.step, micro[0]).to(device)) for micro in batch.micro_batches]


def gradients(job: TrainingJob, step: int) -> dict[str, torch.Tensor]:
    """Return the gradients of one step, before the optimizer uses them."""
    engine = engine_of(job)
    batch = job.plan()[step]
    for _, micro in inputs_of(job, engine, batch):
        engine._backward(micro, batch.num_samples, last=True)
    named = engine.denoiser.named_parameters()
    return {name: weight.grad.clone() for name, weight in named if weight.grad is not None}


def one_step(engine: Engine, job: TrainingJob, step: int) -> StepOutcome:
    batch = job.plan()[step]
    return engine.step(batch, iter(inputs_of(job, engine, batch)), stop=False)


def losses_of(engine: Engine, job: TrainingJob, step: int) -> dict[str, float]:
    """Return the loss of each sample of a step by its variant id, without training."""
    losses: dict[str, float] = {}
    for _, micro in inputs_of(job, engine, job.plan()[step]):
        with torch.no_grad():
            values = engine.objective.losses(micro, engine.denoiser)
        losses |= dict(zip(micro.variant_ids, values.tolist(), strict=True))
    return losses
