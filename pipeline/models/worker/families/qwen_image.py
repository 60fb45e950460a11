"""Qwen-Image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models.families.qwen_image import TOKENS
from pipeline.models.worker.denoiser import Conditions, DenoiserCall, padding_mask
from pipeline.models.worker.text import TextConditioner

_PATCH = 2


class QwenConditioner(TextConditioner):
    """A Qwen2.5-VL behind the pipeline's template; the template's hidden states are dropped."""

    def prompt(self, encoders: Any, caption: str) -> str:
        return encoders.prompt_template_encode.format(caption)

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        embedding, _ = self.encode_prompt(encoders, caption, max_sequence_length=TOKENS)
        return {"text_embedding": embedding}

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        (length,) = text["text_lengths"]
        return {
            "prompt_embeds": text["text_embedding"][:, :length],
            "prompt_embeds_mask": text["text_mask"][:, :length].bool(),
        }

    def guidance_arguments(self, scale: float) -> dict[str, Any]:
        # `true_cfg_scale` scales the guidance away from the negative prompt.
        return {**super().guidance_arguments(scale), "true_cfg_scale": scale}


class QwenImageCall(DenoiserCall):
    """The transformer over the packed latent, then the packed references, with a text mask."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        batch, _, height, width = noisy.shape
        references = (each.to(noisy.dtype) for each in conditions.get("references", ()))
        images = [noisy, *references]
        shapes = [(1, image.shape[2] // _PATCH, image.shape[3] // _PATCH) for image in images]
        tokens = denoiser(
            hidden_states=torch.cat(
                [self.pipeline._pack_latents(image, *image.shape) for image in images], 1
            ),
            timestep=timesteps / self.num_timesteps,
            encoder_hidden_states=conditions["text_embedding"],
            encoder_hidden_states_mask=padding_mask(conditions),
            img_shapes=[shapes] * batch,
            return_dict=False,
        )[0]
        tokens = tokens[:, : (height // _PATCH) * (width // _PATCH)]  # without the references
        factor = self.family.vae_factor
        return self.pipeline._unpack_latents(tokens, height * factor, width * factor, factor).squeeze(2)
