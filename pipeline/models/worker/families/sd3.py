"""Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.loading import component_class
from pipeline.models.worker.text import TextConditioner

_T5_TOKENS = 256


class ClipAndT5Conditioner(TextConditioner):
    """Two CLIPs and, if the model has it, T5."""

    def load(self, dtype: str, device: str) -> Any:
        """See `TextConditioner.load`.

        Without T5 the pipeline reads the width of T5's zeros from the transformer's configuration, so it gets
        a transformer without weights.
        """
        pipeline = super().load(dtype, device)
        if not self.family.model.has("text_encoder_3"):
            with torch.device("meta"):
                skeleton = component_class(self.family, "transformer").from_config(
                    self.family.denoiser_config
                )
            pipeline.register_modules(transformer=skeleton)
        return pipeline

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """See `TextConditioner.embed`."""
        embedding, _, pooled, _ = encoders.encode_prompt(
            caption,
            None,
            None,
            device=encoders.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=_T5_TOKENS,
        )
        return {"text_embedding": embedding, "pooled_text_embedding": pooled}

    def prompt_tensors(self, text: Mapping[str, Tensor]) -> dict[str, Any]:
        """See `TextConditioner.prompt_tensors`."""
        return {
            "prompt_embeds": text["text_embedding"],
            "pooled_prompt_embeds": text["pooled_text_embedding"],
        }


class StableDiffusion3Call(DenoiserCall):
    """The MMDiT, conditioned on both text tensors."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """See `DenoiserCall.predict`."""
        return denoiser(
            hidden_states=noisy,
            timestep=timesteps,
            encoder_hidden_states=conditions["text_embedding"],
            pooled_projections=conditions["pooled_text_embedding"],
            return_dict=False,
        )[0]
