"""The model, its adapter and its optimizer under accelerate, and one optimizer step of them.

B is the number of slots in one rank's share of a micro-batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pipeline.errors import TrainingError
from pipeline.processes.worker.devices import allow_tf32, own_device
from pipeline.recipe import LossSettings
from pipeline.trained_lora.plan.random_streams import hash_bits
from pipeline.trained_lora.worker import startup
from pipeline.trained_lora.worker.adapter.disabled import adapters_disabled
from pipeline.trained_lora.worker.adapter.lora import (
    adapted_networks,
    adapter_state,
    add_lora,
    collect,
    load_networks_state,
    scaled_adapters,
)
from pipeline.trained_lora.worker.adapter.svd_init import init_from_base_weights
from pipeline.trained_lora.worker.adapter.warm_start import warm_start
from pipeline.trained_lora.worker.base_model import enable_memory_savings_and_compile, load_base
from pipeline.trained_lora.worker.checkpoint import TrainingState
from pipeline.trained_lora.worker.distributed import exclude_frozen_weights, make_accelerator
from pipeline.trained_lora.worker.ema import AveragedWeights
from pipeline.trained_lora.worker.engine import QueuedStep, StepOutcome
from pipeline.trained_lora.worker.export.modules import describe_networks
from pipeline.trained_lora.worker.loss import (
    MAX_SKIPPED_STEPS,
    sample_losses,
    share_of_mean,
    skipped_steps_error,
    snr_weights,
)
from pipeline.trained_lora.worker.memory.resident_blocks import least_free_bytes, resident_blocks
from pipeline.trained_lora.worker.micro_input import MicroInput
from pipeline.trained_lora.worker.noise import make_noise_scheduler
from pipeline.trained_lora.worker.optimizers import make_optimizer, make_schedule
from pipeline.trained_lora.worker.sharding import is_sharded, may_need_base_prediction
from pipeline.trained_lora.worker.text_encoders import JointModel, trained_text_encoders
from pipeline.trained_lora.worker.trackers import requested_trackers
from pipeline.trained_lora.worker.training_adapter import load_training_adapter
from pipeline.trained_lora.worker.update_on_device import update_on_device
from pipeline.trained_lora.worker.weight_groups import weight_groups

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin

    from pipeline.models.worker.family import WorkerFamily
    from pipeline.trained_lora.job import TrainingJob
    from pipeline.trained_lora.plan.steps import StepPlan


class Engine:
    """Model, optimizer and learning-rate schedule of one process.

    Attributes:
        accelerator: The process's `Accelerator`.
        scheduler: Noise scheduler for training.
        resident: Blocks of the denoiser that stay on the GPU.
        denoiser: Denoiser with its adapter.
        text: Text encoders with their adapters; None unless they are trained.
        joint_model: The denoiser, together with the text encoders if they are trained.
        networks: The denoiser, and the text encoders that have adapters.
        weights: Trained weights of all networks.
        training_adapter: Frozen LoRA that is active outside of `evaluation` only.
    """

    def __init__(
        self, job: TrainingJob, family: WorkerFamily, begin: startup.Report = startup.report_nothing
    ) -> None:
        """Load the base model, add a fresh adapter and prepare both with accelerate.

        `begin` receives each phase of `startup` when it begins.

        Raises:
            TrainingError: A setting does not fit the model or `start_from`, or a GPU or package is missing.
            LaunchError: No GPU is left for this process.
        """
        allow_tf32(own_device())  # fails with a clear message before CUDA would fail with an obscure one
        self._settings = job.recipe.training
        lora = self._settings.lora

        # The family's default targets all receive gradients. Others, and CLIP's last layers, may not.
        all_weights_used = lora.family_modules and lora.text_encoders is None
        self.accelerator = make_accelerator(
            job.recipe.accelerate,
            mixed_precision=family.mixed_precision(job.recipe.accelerate.mixed_precision),
            find_unused_parameters=not all_weights_used,
            trackers=requested_trackers(job),
            logging_dir=job.folder,
        )
        self._always_predicts_base = job.recipe.accelerate.shard and may_need_base_prediction(job.recipe)
        self._family = family
        self.scheduler = make_noise_scheduler(family, self._settings)

        device = str(self.accelerator.device)
        self.resident = resident_blocks(family, job.recipe, least_free_bytes(self.accelerator.device))
        self.denoiser = self._add_adapter(load_base(family, self.resident.applied(job.recipe), device), begin)
        if lora.text_encoders is not None:
            begin(startup.TEXT_ENCODERS)
        self.text = trained_text_encoders(family, job.recipe, device)
        self.networks = adapted_networks(self.denoiser, self.text_networks)
        if lora.start_from is not None:
            warm_start(self.networks, describe_networks(family, self.networks), lora.start_from)
        self.training_adapter = load_training_adapter(job, family, self.denoiser)
        enable_memory_savings_and_compile(family, self.denoiser, job.recipe)
        self._set_training(True)

        groups = weight_groups(self.networks, self._settings)
        self.weights: list[nn.Parameter] = [weight for group in groups for weight in group["params"]]
        scaled = self.accelerator.scaler is not None
        optimizer = make_optimizer(groups, self._settings, device=device, scaled=scaled)
        self._schedule = make_schedule(optimizer, self._settings)
        self._average = AveragedWeights(self.weights, optimizer, self._settings)
        self._skipped_steps = 0
        # DDP wraps one module, so denoiser and trained text encoders are prepared as one.
        self.joint_model = JointModel(family, self.denoiser, self.text) if self.text else self.denoiser
        exclude_frozen_weights(self.joint_model)
        prepared = cast("Any", self.accelerator.prepare(self.joint_model, optimizer))
        self._model: nn.Module = prepared[0]
        self._optimizer: Any = prepared[1]
        self._on_device = None if scaled else update_on_device(optimizer, self.weights, self._settings)

    def _add_adapter(self, denoiser: nn.Module, begin: startup.Report) -> nn.Module:
        begin(startup.ADAPTER)
        lora, seed = self._settings.lora, self._settings.seed
        add_lora(cast("ModelMixin", denoiser), lora, targets=self._family.lora_targets(), seed=seed)
        if lora.starts_from_base_weights:
            init_from_base_weights(denoiser, lora, seed=seed)
        return denoiser

    @property
    def is_sharded(self) -> bool:
        """Whether all processes must run the denoiser equally often."""
        return is_sharded(self.denoiser)

    @property
    def text_networks(self) -> Mapping[str, nn.Module]:
        """The text encoders that have adapters, by component."""
        return self.text.networks if self.text else {}

    def step(
        self, batch: StepPlan, inputs: Iterator[tuple[StepPlan, MicroInput]], *, stop: bool
    ) -> StepOutcome:
        """Run a step and wait for its numbers; see `start` and `finish`."""
        return self.finish(self.start(batch, inputs, stop=stop))

    def start(
        self, batch: StepPlan, inputs: Iterator[tuple[StepPlan, MicroInput]], *, stop: bool
    ) -> QueuedStep:
        """Run forward and backward over the step's micro-batches, then the optimizer once.

        A GPU may still be computing when this returns.

        Args:
            batch: The step.
            inputs: This rank's tensors; the next ones must be the micro-batches of `batch`.
            stop: Whether this rank received a stop request.

        Raises:
            TrainingError: See `finish`.
        """
        # Dropout draws from torch's global generator; seeding it per step makes a resumed run bit-equal.
        torch.manual_seed(
            hash_bits(32, self._settings.seed, "step", batch.step, self.accelerator.process_index)
        )

        # Losses and timesteps by slot, and the stop flag: one tensor needs one reduction over the ranks.
        step_values = torch.zeros(3, batch.num_samples, device=self.accelerator.device)
        step_values[2, 0] = float(stop)
        num_micro_batches = len(batch.micro_batches)
        for number in range(num_micro_batches):
            planned, micro = next(inputs)
            assert planned.step == batch.step, f"inputs of step {planned.step} in step {batch.step}"
            micro = micro.to(self.accelerator.device)
            losses = self._backward(micro, batch.num_samples, last=number == num_micro_batches - 1)
            values = torch.stack([losses, micro.timesteps.float()]) * micro.weights
            step_values[:2].index_add_(1, micro.indices, values)

        totals = cast("Tensor", self.accelerator.reduce(step_values, reduction="sum"))
        norm = cast("Tensor", self.accelerator.clip_grad_norm_(self.weights, self._settings.max_grad_norm))
        step = QueuedStep(
            batch,
            totals,
            norm,
            learning_rate=float(self._schedule.get_last_lr()[0]),
            schedule_state=self._schedule.state_dict(),
        )
        self._update(step)
        return step

    def finish(self, step: QueuedStep) -> StepOutcome:
        """Wait for the numbers of a step, which may be the last but one.

        Raises:
            TrainingError: The loss or the gradient is not finite; the error lists the samples. Weights,
                optimizer and schedule are those from before the step.
        """
        try:
            return step.outcome()
        except TrainingError:
            self._schedule.load_state_dict(step.schedule_state)
            for group, rate in zip(self._optimizer.param_groups, self._schedule.get_last_lr(), strict=True):
                group["lr"] = rate
            raise

    def _backward(self, micro: MicroInput, num_samples: int, *, last: bool) -> Tensor:
        """Add the micro-batch's gradients; return its losses (B,), detached.

        Ranks exchange gradients in the last micro-batch only.
        """
        # Gradient checkpointing runs the forward pass again in the backward pass, with the same scale.
        scaled = self._adapters_scaled(micro)
        with scaled, nullcontext() if last else self.accelerator.no_sync(self._model):
            losses = self.losses(micro, self._model)
            share = share_of_mean(
                losses,
                micro.weights * micro.loss_weights,
                num_samples=num_samples,
                num_processes=self.accelerator.num_processes,
            )
            self.accelerator.backward(share)
        return losses.detach()

    def losses(self, micro: MicroInput, model: nn.Module) -> Tensor:
        """Return each sample's weighted loss (B,), float32, with its graph.

        Args:
            micro: Tensors on the model's device.
            model: The prepared model, or `joint_model`.
        """
        family, scheduler = self._family, self.scheduler
        noisy = family.noise.add_noise(scheduler, micro.latent, micro.input_noise, micro.timesteps)
        target = family.noise.target(scheduler, micro.latent, micro.noise, micro.timesteps)
        # Processes of a sharded base model must run it equally often, whatever their samples need.
        needs_base = micro.needs_base_prediction or self._always_predicts_base
        base = self._base_prediction(noisy, micro).to(target.dtype) if needs_base else target
        if micro.is_prior is not None:
            target = torch.where(micro.is_prior[:, None, None, None], base, target)

        prediction = self._predict(model, noisy, micro)
        losses = sample_losses(prediction, target, self._settings.loss, micro.place_weights)
        if micro.prior_place_weights is not None:
            losses = losses + sample_losses(prediction, base, self._settings.loss, micro.prior_place_weights)
        if self._settings.loss.weighting == "none":
            return losses
        snr = family.noise.signal_to_noise(scheduler, micro.timesteps)
        return losses * snr_weights(snr, self._settings.loss, family.prediction_type())

    def _predict(self, model: nn.Module, noisy: Tensor, micro: MicroInput) -> Tensor:
        if self.text is None:
            return self._family.denoiser.predict(model, noisy, micro.timesteps, micro.conditions)
        return model(noisy, micro.timesteps, micro.conditions, micro.captions)

    def _base_prediction(self, noisy: Tensor, micro: MicroInput) -> Tensor:
        """Return the base model's answer without adapters, for all samples and without a graph."""
        with self._adapters_disabled(), torch.no_grad(), self.accelerator.autocast():
            return self._predict(self.joint_model, noisy, micro)

    def _update(self, step: QueuedStep) -> None:
        """Step optimizer, average and schedule if the step's numbers are finite.

        Raises:
            TrainingError: They are not finite, unless the device checks them.
        """
        if self._on_device is not None:
            self._on_device.step(step.is_finite())
            self._optimizer.zero_grad()
            self._schedule.step()
            return

        # With a gradient scaler an infinite gradient is normal: the scaler skips the step.
        step.outcome(may_overflow=self.accelerator.scaler is not None)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._optimizer.step_was_skipped:
            self._count_skipped_step(step.batch)
        else:
            self._skipped_steps = 0
            self._average.update()
            self._schedule.step()

    def _count_skipped_step(self, batch: StepPlan) -> None:
        """Advance the schedule over a step that loss scaling skipped, so that it ends as planned."""
        self._skipped_steps += 1
        if self._skipped_steps == MAX_SKIPPED_STEPS:
            raise skipped_steps_error(batch.step)
        with warnings.catch_warnings():
            # torch warns if the schedule is stepped before the optimizer, as after a skipped first step.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self._schedule.step()

    def errors(self, micro: MicroInput, scheduler: Any) -> Tensor:
        """Return each sample's mean squared error (B,), float32, without training.

        The recipe's loss and weighting are not applied, so that runs with other settings can be compared.
        Masks are, because a place that is not trained on says nothing about the result.

        Args:
            micro: Tensors on any device.
            scheduler: Noise scheduler.
        """
        micro = micro.to(self.accelerator.device)
        with self._adapters_scaled(micro), self.evaluation():
            target = self._family.noise.target(scheduler, micro.latent, micro.noise, micro.timesteps)
            prediction = self._predict_noisy(micro, scheduler)
            return sample_losses(prediction, target, LossSettings(), micro.place_weights)

    def output_change(self, micro: MicroInput) -> float:
        """Return the norm of the adapter's effect on the output, relative to the output without it."""
        micro = micro.to(self.accelerator.device)
        with self.evaluation():
            adapted = self._predict_noisy(micro, self.scheduler).double()
        # A second autocast context is needed: autocast caches the cast weights for as long as it is active.
        with self._adapters_disabled(), self.evaluation():
            plain = self._predict_noisy(micro, self.scheduler).double()
        return float((adapted - plain).norm() / plain.norm())

    def _predict_noisy(self, micro: MicroInput, scheduler: Any) -> Tensor:
        noisy = self._family.noise.add_noise(scheduler, micro.latent, micro.input_noise, micro.timesteps)
        return self._predict(self.joint_model, noisy, micro)

    def _adapters_scaled(self, micro: MicroInput) -> AbstractContextManager[None]:
        """Return a context in which the adapters have the scale of the micro-batch."""
        return nullcontext() if micro.lora_scale == 1 else scaled_adapters(self.networks, micro.lora_scale)

    def _adapters_disabled(self) -> AbstractContextManager[None]:
        """Return a context without the effect of all adapters."""
        reset = self._settings.lora.starts_from_base_weights
        return adapters_disabled(self.denoiser, self.text_networks, reset_denoiser=reset)

    def embed_caption(self, caption: str) -> Mapping[str, Tensor] | None:
        """Return the trained text encoders' tensors for a caption, named and shaped as `Family.text_shapes`.

        Returns None if no text encoder is trained. Call it inside `evaluation`.
        """
        if self.text is None:
            return None
        return {name: tensor[0] for name, tensor in self.text.embed([caption]).items()}

    @contextmanager
    def evaluation(self) -> Generator[None]:
        """Disable dropout and gradients within the context."""
        self._set_training(False)
        try:
            with torch.no_grad(), self.accelerator.autocast():
                yield
        finally:
            self._set_training(True)

    def _set_training(self, training: bool) -> None:
        self.training_adapter.active = training
        for network in self.networks.values():
            network.train(training)

    def result_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the adapter holds the weights to export, such as their moving average.

        Previews, validation and export belong inside. Afterwards the trained weights are restored exactly.
        """
        return self._average.applied()

    def state(self, step: int) -> TrainingState:
        """Return the state to save after `step` optimizer steps; the optimizer's tensors are not copied."""
        optimizer = {"optimizer": self._optimizer.state_dict(), "schedule": self._schedule.state_dict()}
        if self.accelerator.scaler is not None:
            optimizer["scaler"] = self.accelerator.scaler.state_dict()
        optimizer |= self._average.state()
        return TrainingState(step=step, adapter=collect(self.networks, adapter_state), optimizer=optimizer)

    def restore(self, state: TrainingState) -> None:
        """Load a state that `state` returned.

        Raises:
            TrainingError: The state belongs to another adapter.
        """
        load_networks_state(self.networks, state.adapter)
        self._optimizer.load_state_dict(state.optimizer["optimizer"])
        self._schedule.load_state_dict(state.optimizer["schedule"])
        self._average.restore(state.optimizer)
        if self.accelerator.scaler is not None and "scaler" in state.optimizer:
            self.accelerator.scaler.load_state_dict(state.optimizer["scaler"])
        if self._on_device is not None:
            self._on_device.reset()

    def weights_finite(self) -> bool:
        """Return whether every trained weight is finite."""
        return all(bool(torch.isfinite(weight).all()) for weight in self.weights)
