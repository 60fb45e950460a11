"""A UNet that is told of sizes, crop and a pooled text embedding: Stable Diffusion XL's and Kolors'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.models.families.base import Conditions
from pipeline.models.families.clip_unet import ClipUNet

if TYPE_CHECKING:
    from torch import Tensor, nn


class SizedUNet(ClipUNet):
    """A family with such a UNet; captions are `text_embedding` and `pooled_text_embedding`."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The UNet's sample, for both text tensors and the geometry: https://arxiv.org/abs/2307.01952, 2.2.

        The six time ids are original height and width, crop top and left, target height and width. They stay
        float32 until they are embedded: half precision would round sizes.
        """
        import torch

        names = ("original_size_hw", "crop_top_left", "target_size_hw")
        time_ids = torch.cat([conditions[name] for name in names], dim=1).float()
        return denoiser(
            noisy,
            timesteps,
            encoder_hidden_states=conditions["text_embedding"],
            added_cond_kwargs={"text_embeds": conditions["pooled_text_embedding"], "time_ids": time_ids},
        ).sample

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Guided away from the empty caption, or from zeros where the base model asks for them."""
        import torch

        if pipeline.config.force_zeros_for_empty_prompt:
            empty_text = {name: torch.zeros_like(tensor) for name, tensor in empty_text.items()}
        return {
            f"{sign}{argument}": tensors[name]
            for sign, tensors in (("", text), ("negative_", empty_text))
            for name, argument in (
                ("text_embedding", "prompt_embeds"),
                ("pooled_text_embedding", "pooled_prompt_embeds"),
            )
        }
