"""Denoiser calls: from a noisy latent, a timestep and conditions to the denoiser's prediction.

Letters of shapes: B samples, T tokens, D embedding width, C latent channels, h and w latent edges.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from pipeline.models.families import Family
from pipeline.models.worker.loading import load_component, pipeline_class, read_component

Conditions: TypeAlias = Mapping[str, Any]
"""Everything the denoiser is conditioned on; each family uses what it needs.

Always `original_size_hw`, `crop_top_left` and `target_size_hw`, int tensors (B, 2), and `text_embedding`
(B, T, D); with some families `pooled_text_embedding` (B, D). If padding is masked, also `text_mask` (B, T)
and `text_lengths`, a tuple of B integers: reading lengths from a tensor would make the host wait for the GPU.

With reference images, also `references`: a tuple of float tensors (B, C, h, w), one for each reference of an
image, in the recipe's order. They are latents as `VaeCodec.normalise` returns them for the posterior's mean,
each with its own h and w. Without reference images, the tuple is empty or missing.

If the denoiser takes a guidance scale, also `guidance`, a float; `DEFAULT_GUIDANCE` if it is missing.
"""

DEFAULT_GUIDANCE = 1.0
"""Guidance scale of training, at which the adapter does not learn distilled guidance."""


def padding_mask(conditions: Conditions) -> Tensor | None:
    """Return `text_mask` as booleans, or None if no caption of the batch is padded."""
    # Without a mask, attention may use its fastest kernels.
    is_padded = len(set(conditions["text_lengths"])) > 1
    return conditions["text_mask"].bool() if is_padded else None


class DenoiserCall(ABC):
    """The network that training adapts; `load` loads it."""

    def __init__(self, family: Family) -> None:
        self.family = family

    @property
    def config(self) -> dict[str, Any]:
        """Configuration of the denoiser."""
        return self.family.denoiser_config

    @property
    def pipeline(self) -> Any:
        """The family's pipeline class of diffusers, for its functions that pack and number tokens."""
        return pipeline_class(self.family)

    @property
    def num_timesteps(self) -> int:
        """Timestep at which the latent is all noise."""
        return self.family.num_timesteps

    def load(self, dtype: str, device: str, *, quantization: Any = None) -> nn.Module:
        """Return the network, frozen and in evaluation mode, with weights and activations in `dtype`.

        `quantization` is a quantization config of diffusers.
        """
        name = self.family.spec.denoiser_name
        if quantization is None:
            return load_component(self.family, name, dtype, device)
        options = {"quantization_config": quantization}
        if device == "cpu":
            # diffusers leaves weights that are mapped to the CPU as they are, because it offloads them.
            return read_component(self.family, name, dtype, **options)
        # Weights are quantized on the device, one at a time, so that the host never holds all of them.
        return read_component(self.family, name, dtype, **options, device_map={"": device})

    def recompute_activations(
        self, denoiser: nn.Module, checkpoint: Callable[..., Any] | None = None
    ) -> None:
        """Let the backward pass recompute activations: less memory, the same gradients.

        `checkpoint` replaces diffusers' own function, which calls a module with its arguments.

        Raises:
            ValueError: The denoiser's class does not support it.
        """
        cast("Any", denoiser).enable_gradient_checkpointing(checkpoint)

    @abstractmethod
    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """Return the prediction (B, C, h, w) for `noisy` (B, C, h, w) at `timesteps` (B,)."""


class UNetCall(DenoiserCall):
    """A UNet conditioned on `text_embedding`, as in Stable Diffusion 1 and 2."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        return denoiser(noisy, timesteps, encoder_hidden_states=conditions["text_embedding"]).sample


class SizedUNetCall(DenoiserCall):
    """A UNet conditioned on both text tensors, sizes and crop: https://arxiv.org/abs/2307.01952, 2.2."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        names = ("original_size_hw", "crop_top_left", "target_size_hw")

        # The ids stay float32 until they are embedded, because half precision would round sizes.
        time_ids = torch.cat([conditions[name] for name in names], dim=1).float()
        return denoiser(
            noisy,
            timesteps,
            encoder_hidden_states=conditions["text_embedding"],
            added_cond_kwargs={"text_embeds": conditions["pooled_text_embedding"], "time_ids": time_ids},
        ).sample
