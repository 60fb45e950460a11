"""Z-Image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.text import TextConditioner, chat_prompt, unpadded


class ZImageConditioner(TextConditioner):
    """A Qwen3 behind its chat template."""

    def prompt(self, encoders: Any, caption: str) -> str:
        return chat_prompt(encoders.tokenizer, caption, enable_thinking=True)

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        embeddings, _ = self.encode_prompt(encoders, caption, do_classifier_free_guidance=False)
        return {"text_embedding": embeddings[0][None]}

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": unpadded(text["text_embedding"], text["text_lengths"])}


class ZImageCall(DenoiserCall):
    """The transformer over lists of latents and captions."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        # The transformer takes `1 - t / num_timesteps` as time and predicts latent minus noise, so its output
        # is negated.
        predictions = denoiser(
            list(noisy.unsqueeze(2)),
            (self.num_timesteps - timesteps) / self.num_timesteps,
            unpadded(conditions["text_embedding"], conditions["text_lengths"]),
            return_dict=False,
        )[0]
        return -torch.stack(list(predictions)).squeeze(2)
