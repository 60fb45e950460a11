"""The model with its adapter and optimizer under accelerate, and the optimizer step they take together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from pipeline.errors import TrainingError
from pipeline.processes.worker.devices import own_device
from pipeline.recipe import LossSettings
from pipeline.trained_lora.plan.seeding import hash_bits
from pipeline.trained_lora.worker.adapter.lora import (
    adapted_networks,
    adapter_state,
    add_lora,
    collect,
    load_networks_state,
    trainable_weights,
)
from pipeline.trained_lora.worker.adapter.svd_init import at_initial_weights, init_from_base_weights
from pipeline.trained_lora.worker.adapter.warm_start import warm_start
from pipeline.trained_lora.worker.base_model import enable_memory_savings_and_compile, load_base
from pipeline.trained_lora.worker.checkpoint import TrainingState
from pipeline.trained_lora.worker.distributed import exclude_frozen_weights, make_accelerator
from pipeline.trained_lora.worker.ema import AveragedWeights
from pipeline.trained_lora.worker.export.layouts import describe_all
from pipeline.trained_lora.worker.loader import MicroInput
from pipeline.trained_lora.worker.loss import sample_losses, share_of_mean, snr_weights
from pipeline.trained_lora.worker.noise import make_noise_scheduler
from pipeline.trained_lora.worker.optimizers import make_optimizer, make_schedule
from pipeline.trained_lora.worker.text_encoders import JointModel, TextEncoders

if TYPE_CHECKING:
    from pipeline.models.worker.family import WorkerFamily
    from pipeline.trained_lora.job import TrainingJob
    from pipeline.trained_lora.plan.steps import StepPlan

MAX_NAMED_SAMPLES = 20

MAX_SKIPPED_STEPS = 20
"""In a row. fp16's loss scaling halves its factor with each; the few that it takes to find one are usual."""


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step came to, the same on every rank.

    Attributes:
        loss: Mean over the step's samples.
        grad_norm: Before it was cut; infinite where fp16's loss scaling left the step out.
        learning_rate: The one that was used.
        stop: Whether any rank was asked to end.
        losses: Of each sample, by its slot's index.
        timesteps: Of each sample, by its slot's index.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    stop: bool
    losses: tuple[float, ...]
    timesteps: tuple[float, ...]


class Engine:
    """One process's model, optimizer and schedule.

    Attributes:
        denoiser: With its adapter.
        text: The text encoders with theirs; None unless they are trained.
        networks: The denoiser, and the text encoders that have adapters.
        weights: What is trained, of all of them.
    """

    def __init__(self, order: TrainingJob, family: WorkerFamily) -> None:
        """Load the base model and put a fresh adapter on it.

        Raises:
            TrainingError: What is asked for needs a GPU or a package, the model takes no such adapter, or the
                LoRA to start from is another.
            LaunchError: There is no GPU for this process.
        """
        own_device()  # says so where there is no GPU for this process, before CUDA does
        self._settings = order.recipe.training
        lora = self._settings.lora
        # Of the family's own modules every one is heard; of what others reach, and of CLIP's layers, not all.
        heard = lora.family_modules and lora.text_encoders is None
        self.accelerator = make_accelerator(order.recipe.accelerate, all_learn=heard)
        self._family = family
        self.scheduler = make_noise_scheduler(family, self._settings)
        device = str(self.accelerator.device)
        self.denoiser = self._adapted(load_base(family, order.recipe, device))
        self.text = None if lora.text_encoders is None else TextEncoders(family, order.recipe, device)
        self.networks = adapted_networks(self.denoiser, self.text_networks)
        if lora.start_from is not None:
            warm_start(self.networks, describe_all(family, self.networks), lora.start_from)
        enable_memory_savings_and_compile(family, self.denoiser, order.recipe)
        self._set_training(True)
        groups = self._weight_groups()
        self.weights: list[nn.Parameter] = [weight for group in groups for weight in group["params"]]
        optimizer = make_optimizer(groups, self._settings)
        self._schedule = make_schedule(optimizer, self._settings)
        self._averaging = AveragedWeights(self.weights, optimizer, self._settings)
        self._whole = self.denoiser if self.text is None else JointModel(family, self.denoiser, self.text)
        exclude_frozen_weights(self._whole)
        self._skipped_steps = 0
        prepared = cast("Any", self.accelerator.prepare(self._whole, optimizer))
        self._model: nn.Module = prepared[0]
        self._optimizer: Any = prepared[1]

    def _adapted(self, denoiser: nn.Module) -> nn.Module:
        lora, seed = self._settings.lora, self._settings.seed
        add_lora(cast("Any", denoiser), lora, targets=self._family.lora_targets(), seed=seed)
        if lora.starts_from_base_weights:
            init_from_base_weights(denoiser, lora, seed=seed)
        return denoiser

    def _weight_groups(self) -> list[dict[str, Any]]:
        """As torch's optimizers take them: the denoiser's, and then the text encoders', which have a rate."""
        by_network = [trainable_weights(network) for network in self.networks.values()]
        groups: list[dict[str, Any]] = [{"params": by_network[0]}]
        text = self._settings.lora.text_encoders
        if text is not None:
            own = {} if text.learning_rate is None else {"lr": text.learning_rate}
            groups.append({"params": [weight for weights in by_network[1:] for weight in weights], **own})
        return groups

    def step(
        self, batch: StepPlan, inputs: Iterator[tuple[StepPlan, MicroInput]], *, stop: bool
    ) -> StepOutcome:
        """Forward and backward over the step's micro-batches, then the optimizer once.

        Args:
            batch: The step; its micro-batches are the next ones of `inputs`.
            inputs: This rank's tensors.
            stop: Whether this rank was asked to end.

        Raises:
            TrainingError: The loss or the gradient is not finite. The weights are those before the step; the
                text names the samples.
        """
        seed = hash_bits(32, self._settings.seed, "step", batch.step, self.accelerator.process_index)
        torch.manual_seed(seed)
        # One row each: losses and timesteps by slot, and in the last one whether to stop.
        noted = torch.zeros(3, batch.num_samples, device=self.accelerator.device)
        noted[2, 0] = float(stop)
        for left in reversed(range(len(batch.micro_batches))):
            planned, micro = next(inputs)
            assert planned.step == batch.step, f"inputs of step {planned.step} in step {batch.step}"
            here = micro.to(self.accelerator.device)
            losses = self._backward(here, batch.num_samples, last=left == 0)
            both = torch.stack([losses, here.timesteps.float()]) * here.weights
            noted[:2].index_add_(1, here.indices, both)
        summed, grad_norm = self._read(noted)
        loss = math.fsum(summed[0]) / batch.num_samples
        if not math.isfinite(loss):
            odd = [slot.variant_id for slot in batch.slots() if not math.isfinite(summed[0][slot.index])]
            raise _not_finite(f"the loss of step {batch.step} is {loss}", odd)
        learning_rate = float(self._schedule.get_last_lr()[0])
        self._update(batch, grad_norm)
        stopping = summed[2][0] > 0
        return StepOutcome(loss, grad_norm, learning_rate, stopping, tuple(summed[0]), tuple(summed[1]))

    def _read(self, noted: Tensor) -> tuple[list[list[float]], float]:
        """The rows of `noted`, summed over all ranks, and the gradient's norm before it is cut here.

        A GPU is waited for once: it has worked through everything that was asked of it by then, and lies idle
        until the next is.
        """
        rows = cast("Tensor", self.accelerator.reduce(noted, reduction="sum"))
        norm = cast("Tensor", self.accelerator.clip_grad_norm_(self.weights, self._settings.max_grad_norm))
        *numbers, grad_norm = torch.cat([rows.flatten(), norm.detach().float().reshape(1)]).tolist()
        width = noted.shape[1]
        return [numbers[start : start + width] for start in range(0, len(numbers), width)], grad_norm

    def _backward(self, here: MicroInput, num_samples: int, *, last: bool) -> Tensor:
        """Losses (B,), detached; gradients are exchanged after the last micro-batch only."""
        sync = nullcontext() if last else self.accelerator.no_sync(self._model)
        with sync:
            losses = self.losses(here, self._model)
            share = share_of_mean(
                losses,
                here.weights,
                num_samples=num_samples,
                num_processes=self.accelerator.num_processes,
            )
            self.accelerator.backward(share)
        return losses.detach()

    def losses(self, micro: MicroInput, model: nn.Module) -> Tensor:
        """Each sample's loss (B,), float32, with its graph; `micro` is on the model's device."""
        family, scheduler = self._family, self.scheduler
        noisy = family.noise.add_noise(scheduler, micro.latent, micro.input_noise, micro.timesteps)
        prediction = self._predict(model, noisy, micro)
        target = family.noise.target(scheduler, micro.latent, micro.noise, micro.timesteps)
        losses = sample_losses(prediction, target, self._settings.loss)
        if self._settings.loss.weighting == "none":
            return losses
        snr = family.noise.signal_to_noise(scheduler, micro.timesteps)
        return losses * snr_weights(snr, self._settings.loss, family.prediction_type())

    def _predict(self, model: nn.Module, noisy: Tensor, micro: MicroInput) -> Tensor:
        if self.text is None:
            return self._family.denoiser.predict(model, noisy, micro.timesteps, micro.conditions)
        return model(noisy, micro.timesteps, micro.conditions, micro.captions)

    def errors(self, micro: MicroInput, scheduler: Any) -> Tensor:
        """Each sample's mean squared error (B,), float32, of the adapter as it is; nothing is trained.

        Neither the recipe's loss nor its weighting is in it, so that runs can be compared.

        Args:
            micro: On any device.
            scheduler: Of the noise.
        """
        here = micro.to(self.accelerator.device)
        with self.evaluation():
            target = self._family.noise.target(scheduler, here.latent, here.noise, here.timesteps)
            return sample_losses(self._answer(here, scheduler), target, LossSettings())

    def output_change(self, micro: MicroInput) -> float:
        """How far what was learned moves the model's answer, relative to the answer's norm without it."""
        here = micro.to(self.accelerator.device)
        with self.evaluation():
            adapted = self._answer(here, self.scheduler).double()
        # Within one autocast the weights that were cast for the first answer would be in the second too.
        with self._nothing_learned(), self.evaluation():
            plain = self._answer(here, self.scheduler).double()
        return float((adapted - plain).norm() / plain.norm())

    @contextmanager
    def _nothing_learned(self) -> Generator[None]:
        """Inside, no adapter does anything.

        One that began as a part of the base weights is that part again: with the fixed one beside it that
        is the base model too, by the very sums that training began with, so that no rounding looks learned.
        """
        began_as_part = self._settings.lora.starts_from_base_weights
        networks: list[Any] = list(self.text_networks.values() if began_as_part else self.networks.values())
        with at_initial_weights(self.denoiser) if began_as_part else nullcontext():
            for network in networks:
                network.disable_adapters()
            try:
                yield
            finally:
                for network in networks:
                    network.enable_adapters()

    def _answer(self, here: MicroInput, scheduler: Any) -> Tensor:
        noisy = self._family.noise.add_noise(scheduler, here.latent, here.input_noise, here.timesteps)
        return self._predict(self._whole, noisy, here)

    @property
    def text_networks(self) -> Mapping[str, nn.Module]:
        """The text encoders that have adapters, by component."""
        return self.text.networks if self.text else {}

    def embed_caption(self, caption: str) -> Mapping[str, Tensor] | None:
        """What the text encoders make of a caption by now, by `Family.text_shapes`; None if none is trained.

        Call it while `evaluation`.
        """
        if self.text is None:
            return None
        return {name: tensor[0] for name, tensor in self.text.embed([caption]).items()}

    @contextmanager
    def evaluation(self) -> Generator[None]:
        """Inside, the model is asked and not trained: no dropout, no gradients."""
        self._set_training(False)
        try:
            with torch.no_grad(), self.accelerator.autocast():
                yield
        finally:
            self._set_training(True)

    def _set_training(self, training: bool) -> None:
        for network in self.networks.values():
            network.train(training)

    def _update(self, batch: StepPlan, grad_norm: float) -> None:
        if not math.isfinite(grad_norm) and self.accelerator.scaler is None:
            self._optimizer.zero_grad()
            names = [slot.variant_id for slot in batch.slots()]
            raise _not_finite(f"the gradient of step {batch.step} is {grad_norm}", names)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._optimizer.step_was_skipped:
            self._skipped(batch)
        else:
            self._skipped_steps = 0
            self._averaging.stepped()
            self._schedule.step()

    def _skipped(self, batch: StepPlan) -> None:
        """Note that loss scaling left the step out; the learning rate goes on, and ends as planned."""
        self._skipped_steps += 1
        if self._skipped_steps == MAX_SKIPPED_STEPS:
            raise _all_skipped(batch)
        with warnings.catch_warnings():
            # Of the very first step torch says that its optimizer has to be stepped before.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self._schedule.step()

    def state(self, step: int) -> TrainingState:
        """All that a resumed run needs, after `step` optimizer steps; the optimizer's part is not copied."""
        optimizer = {"optimizer": self._optimizer.state_dict(), "schedule": self._schedule.state_dict()}
        if self.accelerator.scaler is not None:
            optimizer["scaler"] = self.accelerator.scaler.state_dict()
        optimizer |= self._averaging.state()
        return TrainingState(step=step, adapter=collect(self.networks, adapter_state), optimizer=optimizer)

    def result_weights(self) -> AbstractContextManager[None]:
        """Inside, the adapter is what the run would leave as its LoRA: an average, where one is asked for.

        Pictures, validation and export belong inside. Afterwards training goes on with the very same bits.
        """
        return self._averaging.result()

    def restore(self, state: TrainingState) -> None:
        """Go on from `state`.

        Raises:
            TrainingError: It is of another adapter.
        """
        load_networks_state(self.networks, state.adapter)
        self._optimizer.load_state_dict(state.optimizer["optimizer"])
        self._schedule.load_state_dict(state.optimizer["schedule"])
        self._averaging.restore(state.optimizer)
        if self.accelerator.scaler is not None and "scaler" in state.optimizer:
            self.accelerator.scaler.load_state_dict(state.optimizer["scaler"])

    def weights_finite(self) -> bool:
        """Whether every weight of the adapter is a finite number."""
        return all(bool(torch.isfinite(weight).all()) for weight in self.weights)


def _all_skipped(batch: StepPlan) -> TrainingError:
    what = f"fp16 left out each of the {MAX_SKIPPED_STEPS} steps to step {batch.step}: no gradient was finite"
    fix = "set accelerate.mixed_precision: bf16, or no; or lower training.learning_rate"
    return TrainingError(what, where="accelerate.mixed_precision: fp16", fix=fix)


def _not_finite(what: str, samples: list[str]) -> TrainingError:
    named = "\n".join(samples[:MAX_NAMED_SAMPLES])
    more = f"\nand {len(samples) - MAX_NAMED_SAMPLES} more" if len(samples) > MAX_NAMED_SAMPLES else ""
    fix = (
        "lower training.learning_rate, use bf16 or no mixed precision, or look at these images; the weights "
        "from before this step are kept"
    )
    return TrainingError(what, where=f"samples:\n{named}{more}", fix=fix)
