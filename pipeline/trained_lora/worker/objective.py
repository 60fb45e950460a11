"""The training objective: each sample's loss, and measures of the model's output without training.

B is the number of slots in one rank's share of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeline.recipe import LossSettings
from pipeline.trained_lora.worker.adapter.lora import Networks, scaled_adapters
from pipeline.trained_lora.worker.adapter.svd_init import at_initial_weights
from pipeline.trained_lora.worker.loss import sample_losses, snr_weights
from pipeline.trained_lora.worker.micro_input import MicroInput

if TYPE_CHECKING:
    from accelerate import Accelerator

    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import TrainingSettings
    from pipeline.trained_lora.worker.frozen_lora import FrozenLora
    from pipeline.trained_lora.worker.text_encoders import TextEncoders


@dataclass(frozen=True, eq=False)
class Objective:
    """What a model with adapters is trained to do, and how far it is from it.

    `Engine` describes the networks. With `always_predicts_base`, every micro-batch runs the base model too,
    because the processes of a sharded base model must run it equally often.
    """

    family: WorkerFamily
    settings: TrainingSettings
    accelerator: Accelerator
    noise_scheduler: Any
    joint_model: nn.Module
    text: TextEncoders | None
    networks: Networks
    training_adapter: FrozenLora
    always_predicts_base: bool

    def losses(self, micro: MicroInput, model: nn.Module) -> Tensor:
        """Return each sample's weighted loss (B,), float32, with its graph.

        `model` is the prepared model, or `joint_model`; `micro` is on its device.
        """
        family, noise_scheduler = self.family, self.noise_scheduler
        noisy = family.noise.add_noise(noise_scheduler, micro.latent, micro.input_noise, micro.timesteps)
        target = family.noise.target(noise_scheduler, micro.latent, micro.noise, micro.timesteps)

        # A second forward pass without adapters; most recipes never need it.
        needs_base = micro.needs_base_prediction or self.always_predicts_base
        base = self._base_prediction(noisy, micro).to(target.dtype) if needs_base else target
        if micro.is_prior is not None:
            target = torch.where(micro.is_prior[:, None, None, None], base, target)

        # The graph is built last, so that the base model's pass runs before activations take memory.
        prediction = self._predict(model, noisy, micro)
        losses = sample_losses(prediction, target, self.settings.loss, micro.place_weights)
        if micro.prior_place_weights is not None:
            losses = losses + sample_losses(prediction, base, self.settings.loss, micro.prior_place_weights)
        if self.settings.loss.weighting == "none":
            return losses
        snr = family.noise.signal_to_noise(noise_scheduler, micro.timesteps)

        # After the reduction over places, because the SNR is one number for each sample.
        return losses * snr_weights(snr, self.settings.loss, family.prediction_type())

    def _predict(self, model: nn.Module, noisy: Tensor, micro: MicroInput) -> Tensor:
        if self.text is None:
            return self.family.denoiser.predict(model, noisy, micro.timesteps, micro.conditions)
        return model(noisy, micro.timesteps, micro.conditions, micro.captions)

    def _base_prediction(self, noisy: Tensor, micro: MicroInput) -> Tensor:
        with self._adapters_disabled(), torch.no_grad(), self.accelerator.autocast():
            return self._predict(self.joint_model, noisy, micro)

    def errors(self, micro: MicroInput, noise_scheduler: Any) -> Tensor:
        """Return each sample's mean squared error (B,), float32, without training."""
        micro = micro.to(self.accelerator.device)
        with self.adapters_scaled(micro), self.evaluation():
            target = self.family.noise.target(noise_scheduler, micro.latent, micro.noise, micro.timesteps)
            prediction = self.predict_noisy(micro, noise_scheduler)

            # Without the recipe's loss and weighting, so that runs with other settings can be compared. Masks
            # apply, because a place that is not trained on says nothing about the result.
            return sample_losses(prediction, target, LossSettings(), micro.place_weights)

    def output_change(self, micro: MicroInput) -> float:
        """Return the norm of the adapter's effect on the output, relative to the output without it."""
        micro = micro.to(self.accelerator.device)
        with self.evaluation():
            adapted = self.predict_noisy(micro, self.noise_scheduler).double()

        # A second autocast context is needed: autocast caches the cast weights for as long as it is active.
        with self._adapters_disabled(), self.evaluation():
            plain = self.predict_noisy(micro, self.noise_scheduler).double()
        return float((adapted - plain).norm() / plain.norm())

    def predict_noisy(self, micro: MicroInput, noise_scheduler: Any) -> Tensor:
        """Return the prediction (B, C, h, w) for a micro-batch, once the scheduler has added its noise."""
        noisy = self.family.noise.add_noise(noise_scheduler, micro.latent, micro.input_noise, micro.timesteps)
        return self._predict(self.joint_model, noisy, micro)

    def adapters_scaled(self, micro: MicroInput) -> AbstractContextManager[None]:
        """Return a context in which the adapters have the scale of the micro-batch."""
        return nullcontext() if micro.lora_scale == 1 else scaled_adapters(self.networks, micro.lora_scale)

    @contextmanager
    def _adapters_disabled(self) -> Generator[None]:
        # An adapter initialised from the base weights is reset to its initial weights instead. The frozen
        # adapter then cancels it with the same arithmetic as at the start of training, so that rounding does
        # not count as change.
        is_reset = self.settings.lora.starts_from_base_weights
        denoiser = self.networks[""]
        disabled: list[Any] = [
            network for network in self.networks.values() if not (is_reset and network is denoiser)
        ]
        with at_initial_weights(denoiser) if is_reset else nullcontext():
            for network in disabled:
                network.disable_adapters()
            try:
                yield
            finally:
                for network in disabled:
                    network.enable_adapters()

    @contextmanager
    def evaluation(self) -> Generator[None]:
        """Disable dropout and gradients within the context."""
        self.set_training(False)
        try:
            with torch.no_grad(), self.accelerator.autocast():
                yield
        finally:
            self.set_training(True)

    def set_training(self, training: bool) -> None:
        """Switch all networks between training and evaluation; the training adapter is active in training."""
        self.training_adapter.active = training
        for network in self.networks.values():
            network.train(training)
