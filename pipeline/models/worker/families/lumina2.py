"""Lumina Image 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.text import GemmaConditioner


class Lumina2Conditioner(GemmaConditioner):
    """A Gemma 2 behind the pipeline's system prompt."""

    def prompt(self, encoders: Any, caption: str) -> str:
        return f"{encoders.system_prompt} <Prompt Start> {caption}"

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": text["text_embedding"], "prompt_attention_mask": text["text_mask"].long()}


class Lumina2Call(DenoiserCall):
    """The single-stream transformer."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        # The transformer takes `1 - t / num_timesteps` as time and predicts latent minus noise.
        return -denoiser(
            hidden_states=noisy,
            timestep=1.0 - timesteps / self.num_timesteps,
            encoder_hidden_states=conditions["text_embedding"],
            encoder_attention_mask=conditions["text_mask"].long(),
            return_dict=False,
        )[0]
