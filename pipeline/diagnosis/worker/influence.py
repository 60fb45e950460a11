"""The influence of training images on the loss of held-out images, from gradients at saved steps.

At a step with the weights w, with the losses L of an image and H of the holdout:

    influence = <grad L(w), P grad H(w)>,   P = 1 / (sqrt(v) + eps)

TracIn (Pruthi et al. 2020, https://arxiv.org/abs/2002.08484) has P = 1, which fits gradient descent. Adam
divides the gradient by the root of its second moment v. So does P if the optimizer has one, as in LESS (Xia
et al. 2024, https://arxiv.org/abs/2402.04333). A training step on the image lowers H by the learning rate
times its influence, up to terms of second order. All weights of a LoRA are used, without a projection.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from pipeline.cache.entry_format import INFLUENCE
from pipeline.diagnosis.influence import JOB_FILE_SETTING
from pipeline.encoding.jobs import Encoded, Encoding, Job, Outcome
from pipeline.encoding.progress import Progress
from pipeline.errors import TrainingError
from pipeline.models.worker.family import load_family
from pipeline.processes.worker.devices import out_of_memory_as
from pipeline.recipe import LossSettings
from pipeline.trained_lora.job import TrainingJob, read_job
from pipeline.trained_lora.plan.steps import Slot
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.worker.checkpoint import TrainingState, checkpoint_path, load_checkpoint
from pipeline.trained_lora.worker.engine import Engine
from pipeline.trained_lora.worker.loader import MicroBatchMaker
from pipeline.trained_lora.worker.loss import sample_losses
from pipeline.trained_lora.worker.noise import noise_levels
from pipeline.trained_lora.worker.validation import NOISE_LEVELS

if TYPE_CHECKING:
    from pipeline.cache.store import Store
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.trained_lora.worker.micro_input import MicroInput

_LEVEL_DIGITS = 4
"""Digits of a noise level, which names its noise."""


class Influences:
    """Influences of the training inputs of a job at one of its steps.

    Attributes:
        held_out: Gradient of the holdout's loss, a tensor for each weight.
        direction: The same in the steps of the optimizer: P times `held_out`.
    """

    def __init__(self, job: TrainingJob, family: WorkerFamily, engine: Engine) -> None:
        """Compute nothing yet; `engine` is the job's."""
        self._engine = engine
        self._inputs = job.inputs
        self._batch_size = job.recipe.training.batch_size
        self._seed = job.recipe.training.seed
        # The holdout's loss is the one that a run reports, at the same noise.
        self._base_scheduler: Any = family.noise.load_scheduler()
        self._held_out_maker = MicroBatchMaker(job, family, self._base_scheduler)
        self._maker = MicroBatchMaker(job, family, engine.noise_scheduler)
        self._family = family
        # Evenly spaced in the density of the training.
        levels = noise_levels(
            torch.tensor(NOISE_LEVELS, dtype=torch.float64),
            job.recipe.training.timesteps,
            family.spec.noise.density,
        )
        self._levels = [round(level, _LEVEL_DIGITS) for level in levels.tolist()]
        self.held_out: list[Tensor] = []
        self.direction: list[Tensor] = []

    def restore(self, state: TrainingState) -> None:
        """Set the weights of a step, and compute the gradient of the holdout there."""
        self._engine.restore(state)
        held_out: list[str] = self._inputs.held_out.table["variant_id"].to_list()
        gradient = [torch.zeros_like(weight) for weight in self._engine.weights]
        with self._evaluating():
            for variant_id in held_out:
                for micro in self._batches(self._held_out_maker, variant_id, NOISE_LEVELS):
                    for total, part in zip(gradient, self._gradient(self._errors(micro).sum()), strict=True):
                        total.add_(part)
        number = len(held_out) * len(NOISE_LEVELS)
        scales = _inverse_moments(state, self._engine.weights)
        self.held_out = [each / number for each in gradient]
        self.direction = [
            each if scale is None else each * scale for each, scale in zip(self.held_out, scales, strict=True)
        ]

    def of(self, variant_id: str) -> float:
        """Return the influence of one showing of a training input, with the weight of its dataset."""
        return product(self.gradient(variant_id), self.direction)

    def gradient(self, variant_id: str) -> list[Tensor]:
        """Return the gradient of an input's loss, the mean over noise levels with its captions in turn."""
        # Dropout draws from torch's global generator.
        torch.manual_seed(self._seed)
        gradient = [torch.zeros_like(weight) for weight in self._engine.weights]
        for micro in self._batches(self._maker, variant_id, self._levels):
            with self._engine.objective.adapters_scaled(micro), self._engine.accelerator.autocast():
                losses = self._engine.objective.losses(micro, self._engine.objective.joint_model)
            loss = (losses * micro.loss_weights).sum() / len(self._levels)
            for total, part in zip(gradient, self._gradient(loss), strict=True):
                total.add_(part)
        return gradient

    def _batches(
        self, maker: MicroBatchMaker, variant_id: str, levels: Sequence[float]
    ) -> Iterator[MicroInput]:
        # The holdout is measured with first captions, as in a run.
        captions = 1 if maker is self._held_out_maker else len(self._inputs.named(variant_id).variants)
        slots = [
            Slot(variant_id, index, epoch=0, occurrence=0, drop_caption=False, variant=index % captions)
            for index in range(len(levels))
        ]
        for start in range(0, len(slots), self._batch_size):
            part = slice(start, start + self._batch_size)
            micro = maker.make_fixed(tuple(slots[part]), levels[part])
            yield micro.to(self._engine.accelerator.device)

    def _errors(self, micro: MicroInput) -> Tensor:
        # As `Objective.errors`, but with gradients.
        objective = self._engine.objective
        with objective.adapters_scaled(micro), self._engine.accelerator.autocast():
            target = self._family.noise.target(
                self._base_scheduler, micro.latent, micro.noise, micro.timesteps
            )
            prediction = objective.predict_noisy(micro, self._base_scheduler)
            return sample_losses(prediction, target, LossSettings(), micro.place_weights)

    @contextmanager
    def _evaluating(self) -> Generator[None]:
        self._engine.objective.set_training(False)
        try:
            yield
        finally:
            self._engine.objective.set_training(True)

    def _gradient(self, loss: Tensor) -> list[Tensor]:
        """Return the gradient of each weight; not `backward`, which would exchange it with other ranks."""
        weights = self._engine.weights
        # fp16 has too few digits for small gradients.
        scaler = self._engine.accelerator.scaler
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        # Its annotation does not know of weights without a gradient.
        gradients = cast(
            "Sequence[Tensor | None]", torch.autograd.grad(loss * scale, weights, allow_unused=True)
        )
        return [
            torch.zeros_like(weight) if each is None else each.float() / scale
            for each, weight in zip(gradients, weights, strict=True)
        ]


def product(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the dot product of two gradients."""
    parts = [(a.double() * b.double()).sum() for a, b in zip(left, right, strict=True)]
    return float(torch.stack(parts).sum())


def _inverse_moments(state: TrainingState, weights: Sequence[Tensor]) -> list[Tensor | None]:
    """Return 1 / (sqrt(v) + eps) for each weight; None without Adam's second moment v."""
    optimizer = state.optimizer["optimizer"]
    groups = {index: group for group in optimizer["param_groups"] for index in group["params"]}
    scales: list[Tensor | None] = []
    for index, weight in enumerate(weights):
        own = optimizer["state"].get(index, {})
        moment, group = own.get("exp_avg_sq"), groups[index]
        # An optimizer with 8 bits has quantized moments of another shape or type.
        if not isinstance(moment, Tensor) or moment.shape != weight.shape or not moment.is_floating_point():
            scales.append(None)
            continue
        correction = 1.0 - group["betas"][1] ** float(own["step"])
        scales.append(1.0 / ((moment.to(weight.device).float() / correction).sqrt() + group["eps"]))
    return scales


class InfluenceEncoder:
    """Computes the influences of an encoding."""

    def __init__(self, encoding: Encoding, progress: Progress) -> None:
        self._progress = progress
        self._job = read_job(Path(encoding.settings[JOB_FILE_SETTING]))
        family = load_family(self._job.base, self._job.component_folders)
        with out_of_memory_as(_memory_error):
            self._influences = Influences(self._job, family, Engine(self._job, family))

    def encoded(self, jobs: Iterable[Job], store: Store) -> Iterator[tuple[Job, Outcome]]:
        """Yield each job with its influence.

        Raises:
            StoreError: A latent or a text embedding cannot be read.
            TrainingError: A checkpoint is damaged, or memory ran out.
        """
        # By step, because the gradient of the holdout takes as long as all of its images.
        by_step: defaultdict[int, list[Job]] = defaultdict(list)
        for job in jobs:
            by_step[job.work["step"]].append(job)
        checkpoints = RunLayout(self._job.folder).checkpoints
        for step, of_step in sorted(by_step.items()):
            state = load_checkpoint(checkpoint_path(checkpoints, step), self._job.run)
            with out_of_memory_as(_memory_error):
                self._influences.restore(state)
            for job in of_step:
                self._progress.working_on(job.name)
                # Another process may have computed it since the command checked.
                if store.check(job.spec).valid:
                    yield job, "present"
                    continue
                with out_of_memory_as(_memory_error):
                    influence = self._influences.of(job.work["variant_id"])
                yield job, Encoded({INFLUENCE: np.array([influence], dtype=np.float32)}, {})


def _memory_error(usage: str) -> TrainingError:
    return TrainingError(
        "memory ran out while gradients were computed" + (f" ({usage})" if usage else ""),
        where="latentline diagnose --influence",
        fix="close other programs that use the device; the training needed about as much memory",
    )
