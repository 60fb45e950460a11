"""Tensors of one forward and backward pass of a rank.

B is the number of slots in one rank's share of a micro-batch; C, h and w are the latent's dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor


@dataclass(frozen=True)
class MicroInput:
    """One rank's tensors for one forward and backward pass.

    The dtypes below hold after `to`; before, tensors of the cache have their stored dtype.

    Attributes:
        variant_ids: Ids of the B slots.
        latent: Float32 (B, C, h, w).
        noise: Float32 (B, C, h, w): the noise that the target is computed from.
        input_noise: Float32 (B, C, h, w): the noise mixed into the latent, `noise` plus any perturbation.
        timesteps: (B,), see `NoiseProcess.timesteps`.
        conditions: See `denoiser.Conditions`: text tensors float32 (B, ...), sizes int64 (B, 2), and with
            references a tuple of float32 (B, C, h, w) in the recipe's order. Text tensors are absent if text
            encoders are trained.
        weights: Float32 (B,): 1, or 0 for a placeholder.
        loss_weights: Float32 (B,): `loss_weight` of each slot's dataset.
        is_prior: Boolean (B,): whether a slot's target is the base model's prediction; None if no slot's is.
        place_weights: Float32 (B, 1, h, w): weights of the loss by place; None if no slot has a mask.
        prior_place_weights: Float32 (B, 1, h, w): weights by place of the distance from the base model's
            prediction; None if no slot has any.
        lora_scale: Factor of the LoRA's effect on the slots; -1 for the opposite side of a slider.
        indices: Int64 (B,): the slots' indices in the step's global batch.
        captions: Captions of the B slots, "" if dropped; empty unless text encoders are trained.
    """

    variant_ids: tuple[str, ...]
    latent: Tensor
    noise: Tensor
    input_noise: Tensor
    timesteps: Tensor
    conditions: dict[str, Any]
    weights: Tensor
    loss_weights: Tensor
    indices: Tensor
    captions: tuple[str, ...] = ()
    is_prior: Tensor | None = None
    place_weights: Tensor | None = None
    prior_place_weights: Tensor | None = None
    lora_scale: int = 1

    @property
    def needs_base_prediction(self) -> bool:
        """Whether the loss needs the prediction of the base model without the LoRA."""
        return self.is_prior is not None or self.prior_place_weights is not None

    def to(self, device: torch.device) -> MicroInput:
        """Copy the tensors to `device` and convert floats to float32 there.

        Copies from pinned memory are asynchronous.
        """

        def moved(tensor: Tensor) -> Tensor:
            # Converted on the device, so that less is copied and the host converts nothing.
            on_device = tensor.to(device, non_blocking=True)
            return on_device.float() if on_device.is_floating_point() else on_device

        return self._map(moved)

    def pinned(self) -> MicroInput:
        """Copy the tensors to pinned memory."""
        return self._map(Tensor.pin_memory)

    def _map(self, convert: Callable[[Tensor], Tensor]) -> MicroInput:
        # Values without tensors, such as ids and captions, stay as they are.
        values = {each.name: recursively_apply(convert, getattr(self, each.name)) for each in fields(self)}
        return replace(self, **values)
