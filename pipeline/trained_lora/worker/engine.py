"""The model, its adapter and its optimizer under accelerate, and one optimizer step of them."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pipeline.errors import TrainingError
from pipeline.processes.worker.devices import allow_tf32, avoid_cudnn_attention, own_device
from pipeline.trained_lora.fingerprint import shares_casts
from pipeline.trained_lora.plan.random_streams import hash_bits
from pipeline.trained_lora.worker import startup
from pipeline.trained_lora.worker.adapter.lora import (
    adapted_networks,
    adapter_state,
    add_lora,
    collect,
    load_networks_state,
)
from pipeline.trained_lora.worker.adapter.shared_casts import share_casts
from pipeline.trained_lora.worker.adapter.svd_init import init_from_base_weights
from pipeline.trained_lora.worker.adapter.timestep_ranks import TimestepRanks
from pipeline.trained_lora.worker.adapter.warm_start import warm_start
from pipeline.trained_lora.worker.adapter.weight_norms import norm_limit
from pipeline.trained_lora.worker.base_model import BASE_DTYPES, enable_memory_savings_and_compile
from pipeline.trained_lora.worker.checkpoint import TrainingState
from pipeline.trained_lora.worker.compiled import compiled_blocks
from pipeline.trained_lora.worker.context_lora import load_base_with_context
from pipeline.trained_lora.worker.distributed import exclude_frozen_weights, make_accelerator
from pipeline.trained_lora.worker.ema import AveragedWeights
from pipeline.trained_lora.worker.export.modules import describe_networks
from pipeline.trained_lora.worker.loss import (
    MAX_SKIPPED_STEPS,
    not_finite_error,
    share_of_mean,
    skipped_steps_error,
)
from pipeline.trained_lora.worker.memory.resident_blocks import least_free_bytes, resident_blocks
from pipeline.trained_lora.worker.micro_input import MicroInput
from pipeline.trained_lora.worker.noise import make_noise_scheduler
from pipeline.trained_lora.worker.objective import Objective
from pipeline.trained_lora.worker.optimizers import (
    make_lr_scheduler,
    make_optimizer,
    update_on_device,
    weight_groups,
)
from pipeline.trained_lora.worker.sharding import is_sharded, may_need_base_prediction
from pipeline.trained_lora.worker.text_encoders import JointModel, trained_text_encoders
from pipeline.trained_lora.worker.training_adapter import load_training_adapter

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin

    from pipeline.models.worker.family import WorkerFamily
    from pipeline.trained_lora.job import TrainingJob
    from pipeline.trained_lora.plan.steps import StepPlan


@dataclass(frozen=True)
class StepOutcome:
    """Result of one optimizer step; identical on every rank.

    Attributes:
        grad_norm: Gradient norm before clipping; infinite if fp16's loss scaling skipped the step.
        stop: Whether any rank received a stop request.
        losses: Loss of each sample, indexed by slot; `loss` is their mean.
        timesteps: Timestep of each sample, indexed by slot.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    stop: bool
    losses: tuple[float, ...]
    timesteps: tuple[float, ...]


class QueuedStep:
    """A step that the device may still be computing."""

    def __init__(
        self,
        batch: StepPlan,
        values: Tensor,
        grad_norm: Tensor,
        *,
        learning_rate: float,
        lr_scheduler_state: dict[str, Any],
        num_averaged: int,
    ) -> None:
        """Queue the copy of the numbers to the host; a GPU does not wait for it.

        `values` are (3, B) on the device for a step of B samples: losses, timesteps, and the number of stop
        requests in the first column. `grad_norm` is a scalar on the device, before clipping.
        `lr_scheduler_state` and `num_averaged`, the updates of the moving average, are from before the step's
        update.
        """
        self.batch = batch
        self.lr_scheduler_state = lr_scheduler_state
        self.num_averaged = num_averaged
        self._learning_rate = learning_rate

        # One tensor, so that one copy brings all numbers of the step to the host.
        self._numbers = torch.cat([values.flatten(), grad_norm.detach().float().reshape(1)])

        # The copy from a GPU goes to pinned memory and does not block.
        self._on_host = self._numbers.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if self._numbers.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._numbers.device))
        self._outcome: StepOutcome | None = None

    @property
    def is_read(self) -> bool:
        """Whether `outcome` has returned before."""
        return self._outcome is not None

    def is_finite(self) -> Tensor:
        """Return whether all numbers are finite, a boolean scalar on the device."""
        return self._numbers.isfinite().all()

    def outcome(self, *, may_overflow: bool = False) -> StepOutcome:
        """Wait for the numbers and return them; `may_overflow` permits an infinite gradient norm.

        Raises:
            TrainingError: The loss or the gradient is not finite; the error lists the samples.
        """
        if self._outcome is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._outcome = self._checked(self._on_host.tolist(), may_overflow=may_overflow)
        return self._outcome

    def _checked(self, numbers: list[float], *, may_overflow: bool) -> StepOutcome:
        batch, grad_norm = self.batch, numbers.pop()
        width = len(numbers) // 3
        losses, timesteps, stop_requests = (numbers[start : start + width] for start in (0, width, 2 * width))

        loss = math.fsum(losses) / batch.num_samples
        if not math.isfinite(loss):
            samples = [slot.variant_id for slot in batch.slots() if not math.isfinite(losses[slot.index])]
            raise not_finite_error("loss", batch.step, loss, samples)
        if not (math.isfinite(grad_norm) or may_overflow):
            samples = [slot.variant_id for slot in batch.slots()]
            raise not_finite_error("gradient", batch.step, grad_norm, samples)

        return StepOutcome(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=self._learning_rate,
            stop=stop_requests[0] > 0,
            losses=tuple(losses),
            timesteps=tuple(timesteps),
        )


class Engine:
    """Model, optimizer and learning-rate schedule of one process.

    Attributes:
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

        Raises:
            TrainingError: A setting does not fit the model or `start_from`, or a GPU or package is missing.
            LaunchError: No GPU is left for this process.
        """
        # Before accelerate, because `own_device` has a clear error for a process without a GPU.
        own = own_device()
        allow_tf32(own)
        avoid_cudnn_attention(own)
        self._settings = job.recipe.training
        lora = self._settings.lora
        self.compiled = compiled_blocks(family, job.recipe, own)

        # The family's default targets all receive gradients. Others, and CLIP's last layers, may not.
        all_weights_used = lora.family_modules and lora.text_encoders is None
        precision = family.mixed_precision(job.recipe.accelerate.mixed_precision)
        self.accelerator = make_accelerator(
            job.recipe.accelerate,
            mixed_precision=precision,
            find_unused_parameters=not all_weights_used,
        )
        self._family = family
        self.noise_scheduler = make_noise_scheduler(family, self._settings)

        device = str(self.accelerator.device)

        # The free memory is measured before the base model takes any.
        self.resident = resident_blocks(family, job.recipe, least_free_bytes(self.accelerator.device))
        self.denoiser = self._add_adapter(
            load_base_with_context(family, self.resident.applied(job.recipe), device), begin
        )
        if shares_casts(job.inputs, precision):
            share_casts(self.denoiser, getattr(torch, BASE_DTYPES[precision]))
        ranks = lora.timestep_ranks
        self._timestep_ranks = None if ranks is None else TimestepRanks(self.denoiser, ranks)
        if lora.text_encoders is not None:
            begin(startup.TEXT_ENCODERS)
        self.text = trained_text_encoders(family, job.recipe, device)
        self.networks = adapted_networks(self.denoiser, self.text_networks)
        if lora.start_from is not None:
            warm_start(self.networks, describe_networks(family, self.networks), lora.start_from)
        self.training_adapter = load_training_adapter(job, family, self.denoiser)

        # After the adapter was added, because peft replaces modules of the blocks.
        enable_memory_savings_and_compile(family, self.denoiser, self.compiled.applied(job.recipe))

        # DDP wraps one module, so denoiser and trained text encoders are prepared as one.
        self.joint_model = JointModel(family, self.denoiser, self.text) if self.text else self.denoiser
        self.objective = Objective(
            family=family,
            settings=self._settings,
            accelerator=self.accelerator,
            noise_scheduler=self.noise_scheduler,
            joint_model=self.joint_model,
            text=self.text,
            networks=self.networks,
            training_adapter=self.training_adapter,
            always_predicts_base=job.recipe.accelerate.shard and may_need_base_prediction(job.recipe),
        )
        self.objective.set_training(True)

        groups = weight_groups(self.networks, self._settings)
        self.weights: list[nn.Parameter] = [weight for group in groups for weight in group["params"]]
        scaled = self.accelerator.scaler is not None
        optimizer = make_optimizer(groups, self._settings, device=device, scaled=scaled)
        self._lr_scheduler = make_lr_scheduler(optimizer, self._settings)
        self._average = AveragedWeights(self.weights, optimizer, self._settings)
        self._norm_limit = norm_limit(self.networks.values(), lora)
        self._skipped_steps = 0

        exclude_frozen_weights(self.joint_model)

        # Without the schedule, which accelerate would step once per process (FAILURES R04).
        prepared = cast("Any", self.accelerator.prepare(self.joint_model, optimizer))
        self._model: nn.Module = prepared[0]
        self._optimizer: Any = prepared[1]

        # With fp16, accelerate's gradient scaler skips such steps already.
        self._on_device = None if scaled else update_on_device(optimizer, self.weights)

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

        The next of `inputs`, this rank's tensors, must be the micro-batches of `batch`. `stop` is this rank's
        stop request.
        """
        # Dropout draws from torch's global generator; seeding it per step makes a resumed run bit-equal.
        torch.manual_seed(
            hash_bits(32, self._settings.seed, "step", batch.step, self.accelerator.process_index)
        )

        # Losses and timesteps by slot, and the stop flag: one tensor needs one reduction over the ranks.
        step_values = torch.zeros(3, batch.num_samples, device=self.accelerator.device)
        step_values[2, 0].fill_(float(stop))  # an assignment of a number would wait for the GPU

        num_micro_batches = len(batch.micro_batches)
        for number in range(num_micro_batches):
            planned, micro = next(inputs)
            assert planned.step == batch.step, f"inputs of step {planned.step} in step {batch.step}"
            micro = micro.to(self.accelerator.device)
            losses = self._backward(micro, batch.num_samples, last=number == num_micro_batches - 1)
            values = torch.stack([losses, micro.timesteps.float()]) * micro.weights

            # Every slot is on one rank. A placeholder has the index of another slot, and adds zero.
            step_values[:2].index_add_(1, micro.indices, values)

        totals = cast("Tensor", self.accelerator.reduce(step_values, reduction="sum"))

        # This also unscales fp16's gradients, which is possible once per step, and the norm shows whether all
        # of them are finite. So nothing may change a gradient before.
        norm = cast("Tensor", self.accelerator.clip_grad_norm_(self.weights, self._settings.max_grad_norm))
        step = QueuedStep(
            batch,
            totals,
            norm,
            learning_rate=float(self._lr_scheduler.get_last_lr()[0]),
            lr_scheduler_state=self._lr_scheduler.state_dict(),
            num_averaged=self._average.num_updates,
        )
        self._update(step)

        # A GPU may still be computing; `finish` waits for the numbers.
        return step

    def finish(self, step: QueuedStep) -> StepOutcome:
        """Read a step's losses and gradient norm; it may lag one step behind.

        Raises:
            TrainingError: The loss or the gradient is not finite; the error lists the samples. Weights, their
                average, optimizer and schedule are those from before the step.
        """
        try:
            return step.outcome()
        except TrainingError:
            self._average.num_updates = step.num_averaged
            self._lr_scheduler.load_state_dict(step.lr_scheduler_state)

            # A schedule writes rates into the optimizer when it is stepped, but not when its state is loaded.
            for group, rate in zip(
                self._optimizer.param_groups, self._lr_scheduler.get_last_lr(), strict=True
            ):
                group["lr"] = rate
            raise

    def _backward(self, micro: MicroInput, num_samples: int, *, last: bool) -> Tensor:
        """Add the micro-batch's gradients; return its losses (B,), detached."""
        # Gradient checkpointing runs the forward pass again in the backward pass, with the same scale and
        # ranks.
        scaled, masked = self.objective.adapters_scaled(micro), self._ranks_masked(micro)

        # Gradients add up on each rank, so that one exchange in the last micro-batch is enough.
        with scaled, masked, nullcontext() if last else self.accelerator.no_sync(self._model):
            losses = self.objective.losses(micro, self._model)
            share = share_of_mean(
                losses,
                micro.weights * micro.loss_weights,
                num_samples=num_samples,
                num_processes=self.accelerator.num_processes,
            )
            self.accelerator.backward(share)
        return losses.detach()

    def _ranks_masked(self, micro: MicroInput) -> AbstractContextManager[None]:
        if self._timestep_ranks is None:
            return nullcontext()
        num_timesteps: int = self.noise_scheduler.config.num_train_timesteps
        return self._timestep_ranks.applied(micro.timesteps, num_timesteps)

    def _update(self, step: QueuedStep) -> None:
        """Step optimizer, average and schedule if the step's numbers are finite."""
        if self._on_device is not None:
            # The device skips an update that is not finite, and the host finds out when it reads the numbers.
            is_updated = self._on_device.step(step.is_finite())
            self._optimizer.zero_grad()
            if self._norm_limit is not None:
                self._norm_limit.apply(is_updated)
            self._average.update_on_device(is_updated)
            self._lr_scheduler.step()
            return

        # With a gradient scaler an infinite gradient is normal: the scaler skips the step.
        # On the host, a step that is not finite raises here, before the optimizer changes a weight.
        step.outcome(may_overflow=self.accelerator.scaler is not None)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._optimizer.step_was_skipped:
            self._count_skipped_step(step.batch)
        else:
            self._skipped_steps = 0
            if self._norm_limit is not None:
                self._norm_limit.apply()
            self._average.update()
            self._lr_scheduler.step()

    def _count_skipped_step(self, batch: StepPlan) -> None:
        # A skipped step counts as a step of the plan, so the schedule advances and ends as planned.
        self._skipped_steps += 1
        if self._skipped_steps == MAX_SKIPPED_STEPS:
            raise skipped_steps_error(batch.step)
        with warnings.catch_warnings():
            # torch warns if the schedule is stepped before the optimizer, as after a skipped first step.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self._lr_scheduler.step()

    def embed_caption(self, caption: str) -> Mapping[str, Tensor] | None:
        """Return the trained text encoders' tensors for a caption, named and shaped as `Family.text_shapes`.

        Returns None if no text encoder is trained. Call it inside `evaluation`.
        """
        if self.text is None:
            return None
        return {name: tensor[0] for name, tensor in self.text.embed([caption]).items()}

    def result_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the adapter holds the weights to export, such as their moving average.

        Afterwards the trained weights are restored exactly.
        """
        return self._average.applied()

    def state(self, step: int) -> TrainingState:
        """Return the state to save after `step` optimizer steps; the optimizer's tensors are not copied."""
        optimizer = {"optimizer": self._optimizer.state_dict(), "schedule": self._lr_scheduler.state_dict()}
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
        self._lr_scheduler.load_state_dict(state.optimizer["schedule"])
        self._average.restore(state.optimizer)
        if self.accelerator.scaler is not None and "scaler" in state.optimizer:
            self.accelerator.scaler.load_state_dict(state.optimizer["scaler"])
        if self._on_device is not None:
            self._on_device.reset()

    def weights_finite(self) -> bool:
        """Return whether every trained weight is finite."""
        return all(bool(torch.isfinite(weight).all()) for weight in self.weights)


class UnreadSteps:
    """Reads and logs the numbers of steps in their order, without letting a GPU wait for the host."""

    def __init__(self, engine: Engine, log: Callable[[StepPlan, StepOutcome, float], None]) -> None:
        self._engine = engine
        self._log = log
        self._steps: deque[tuple[QueuedStep, float]] = deque()
        self._last_read_s = 0.0

    @property
    def oldest(self) -> int | None:
        """Number of the oldest unread step."""
        return self._steps[0][0].batch.step if self._steps else None

    def add(self, step: QueuedStep, started_s: float) -> None:
        """Add a step that `Engine.start` returned; it began at `started_s` of `time.perf_counter`."""
        self._steps.append((step, started_s))

    def read(self, *, at_once: bool) -> bool:
        """Log all steps but the newest, and return whether any rank requested a stop in them.

        The newest step is included if its numbers are known, `at_once` is set, or the run stops.

        Raises:
            TrainingError: See `Engine.finish`; `oldest` is the step.
        """
        stopping = False
        while self._steps:
            step, started_s = self._steps[0]

            # A GPU may still compute the newest step. Reading it now would leave the GPU without queued work.
            if len(self._steps) == 1 and not (step.is_read or at_once or stopping):
                break
            outcome = self._engine.finish(step)
            self._steps.popleft()

            # A GPU begins a step when it has ended the one before.
            read_s = time.perf_counter()
            self._log(step.batch, outcome, read_s - max(started_s, self._last_read_s))
            self._last_read_s = read_s
            stopping |= outcome.stop
        return stopping
