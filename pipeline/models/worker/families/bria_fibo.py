"""Bria FIBO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipeline.models.families import Family
from pipeline.models.families.bria_fibo import TOKENS
from pipeline.models.families.parts.text import LanguageModelText
from pipeline.models.worker.denoiser import Conditions, DenoiserCall, padding_mask
from pipeline.models.worker.families.flux import text_ids
from pipeline.models.worker.text import CachedPromptConditioner, own_tokens


class BriaFiboConditioner(CachedPromptConditioner):
    """All hidden states of a SmolLM3 side by side."""

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        # The pipeline's `encode_prompt` is based on this method.
        _, layers, mask = encoders.get_prompt_embeds(
            caption, max_sequence_length=TOKENS, device=encoders.text_encoder.device
        )
        return {"text_embedding": own_tokens(torch.cat(layers, dim=2), mask)}

    def encoded_prompt(
        self,
        pipeline: Any,
        text: Mapping[str, Tensor],
        negative_text: Mapping[str, Tensor],
        arguments: Mapping[str, Any],
    ) -> tuple[Any, ...]:
        prompt, prompt_layers = _by_layer(self.family, text)
        negative, negative_layers = _by_layer(self.family, negative_text)
        masks = text["text_mask"], negative_text["text_mask"]
        return prompt, negative, text_ids(prompt)[None], *masks, prompt_layers, negative_layers


class BriaFiboCall(DenoiserCall):
    """The transformer, with one hidden state of the text for each block."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        mask, attention = padding_mask(conditions), dict[str, Any]()
        batch, channels, height, width = noisy.shape
        text, layers = _by_layer(self.family, conditions)
        num_blocks = int(self.config["num_layers"]) + int(self.config["num_single_layers"])
        if mask is not None:
            joint_mask = torch.cat([mask, mask.new_ones(batch, height * width)], dim=1)
            attention["attention_mask"] = joint_mask[:, None, None]
        with noisy.device:  # as in FLUX.1's `pack`, without a copy from the CPU
            ids = self.pipeline._prepare_latent_image_ids(batch, height, width, noisy.device, noisy.dtype)
        tokens = denoiser(
            hidden_states=self.pipeline._pack_latents_no_patch(noisy, batch, channels, height, width),
            timestep=timesteps,
            encoder_hidden_states=text,
            # As in the pipeline, blocks beyond the text's layers get the last layer.
            text_encoder_layers=layers[-num_blocks:] + layers[-1:] * (num_blocks - len(layers)),
            joint_attention_kwargs=attention,
            txt_ids=text_ids(text),
            img_ids=ids,
            return_dict=False,
        )[0]
        return self.pipeline._unpack_latents_no_patch(tokens, height, width, 1)


def _by_layer(family: Family, text: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the last two layers side by side, (B, T, 2 D), and all layers, (B, T, D) each."""
    width = cast("LanguageModelText", family.spec.text).hidden_size(family.model)
    layers = list(text["text_embedding"].split(width, dim=2))
    return torch.cat([layers[-1], layers[-2]], dim=2), layers
