"""FLUX.1, and the packed tokens that Chroma, Bria FIBO and FLUX.1 Kontext share with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models.worker.denoiser import DEFAULT_GUIDANCE, Conditions, DenoiserCall
from pipeline.models.worker.text import POOLED_PROMPT, TextConditioner

PATCH = 2
"""Edge, in latent values, of the patch that is packed into one token."""


class T5AndClipConditioner(TextConditioner):
    """T5's hidden states, and CLIP's pooled output."""

    prompt_names = POOLED_PROMPT

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        embedding, pooled, _ = self.encode_prompt(encoders, caption)
        return {"text_embedding": embedding, "pooled_text_embedding": pooled}

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], negative_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        # Guidance is distilled, so the pipeline needs no negative prompt.
        return self.prompt_tensors(text)


class FluxCall(DenoiserCall):
    """The transformer over packed latents."""

    def image_tokens(self, noisy: Tensor, conditions: Conditions) -> dict[str, Tensor]:
        """Return `hidden_states` and `img_ids`, the noisy latent first."""
        return pack(self.pipeline, noisy)

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        guidance = None
        if self.family.takes_guidance:
            scale = conditions.get("guidance", DEFAULT_GUIDANCE)
            guidance = torch.full((len(noisy),), scale, device=noisy.device)

        text = conditions["text_embedding"]
        tokens = denoiser(
            **self.image_tokens(noisy, conditions),
            timestep=timesteps / self.num_timesteps,
            guidance=guidance,
            pooled_projections=conditions["pooled_text_embedding"],
            encoder_hidden_states=text,
            txt_ids=text_ids(text),
            return_dict=False,
        )[0]
        return unpack(self.pipeline, tokens, noisy, self.family.vae_factor)


def pack(pipeline: Any, noisy: Tensor) -> dict[str, Tensor]:
    """Return `hidden_states` and `img_ids` of a noisy latent (B, C, h, w)."""
    batch, channels, height, width = noisy.shape
    rows, columns = height // PATCH, width // PATCH
    # The pipeline would create the ids on the CPU, and their copy would wait for the GPU.
    with noisy.device:
        ids = pipeline._prepare_latent_image_ids(batch, rows, columns, noisy.device, torch.float32)
    return {
        "hidden_states": pipeline._pack_latents(noisy, batch, channels, height, width),
        "img_ids": ids,
    }


def text_ids(text: Tensor) -> Tensor:
    """Return zeros (T, 3), the position ids that the pipelines give to text tokens (B, T, D)."""
    return text.new_zeros(text.shape[1], 3)


def unpack(pipeline: Any, tokens: Tensor, noisy: Tensor, factor: int) -> Tensor:
    """Rearrange the transformer's output tokens (B, T, D) into a latent with the shape of `noisy`."""
    height, width = noisy.shape[2:]

    # One token per 2x2 patch of the latent; tokens of a reference image follow.
    tokens = tokens[:, : (height // PATCH) * (width // PATCH)]
    return pipeline._unpack_latents(tokens, height * factor, width * factor, factor)
