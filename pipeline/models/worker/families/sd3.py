"""Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models.families.sd3 import T5_TOKENS
from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.loading import component_class
from pipeline.models.worker.text import POOLED_PROMPT, TextConditioner
from pipeline.models.worker.text_layers import ALL_ON_DEVICE, LayerOffload


class ClipAndT5Conditioner(TextConditioner):
    """Two CLIPs and, if the model has it, T5."""

    prompt_names = POOLED_PROMPT

    def load(self, dtype: str, device: str, offload: LayerOffload = ALL_ON_DEVICE) -> Any:
        pipeline = super().load(dtype, device, offload)

        # Without T5 the pipeline reads the width of T5's zeros from the transformer's configuration, so it
        # gets a transformer without weights.
        if not self.family.model.has("text_encoder_3"):
            with torch.device("meta"):
                skeleton = component_class(self.family, "transformer").from_config(
                    self.family.denoiser_config
                )
            pipeline.register_modules(transformer=skeleton)
        return pipeline

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        # Without T5, the family's limit is CLIP's, but T5's zeros keep their length.
        options = {"do_classifier_free_guidance": False, "max_sequence_length": T5_TOKENS}
        embedding, _, pooled, _ = self.encode_prompt(
            encoders, caption, prompt_2=None, prompt_3=None, **options
        )
        return {"text_embedding": embedding, "pooled_text_embedding": pooled}


class StableDiffusion3Call(DenoiserCall):
    """The MMDiT, conditioned on both text tensors."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        return denoiser(
            hidden_states=noisy,
            timestep=timesteps,
            encoder_hidden_states=conditions["text_embedding"],
            pooled_projections=conditions["pooled_text_embedding"],
            return_dict=False,
        )[0]
