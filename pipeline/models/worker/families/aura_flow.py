"""AuraFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.text import TextConditioner, own_tokens


class ZeroPaddedT5Conditioner(TextConditioner):
    """T5's hidden states, padded with zeros."""

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        embedding, mask, *_ = self.encode_prompt(encoders, caption, do_classifier_free_guidance=False)
        return {"text_embedding": own_tokens(embedding, mask.reshape(embedding.shape)[..., 0])}

    def stack(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        # The transformer sees padding: zeros on the side where the tokenizer pads.
        pads_left = self.family.model.config("tokenizer").get("padding_side", "left") == "left"
        padded: list[Tensor] = []
        for text in texts:
            num_zeros = self.family.max_length() - len(text["text_embedding"])
            rows = (num_zeros, 0) if pads_left else (0, num_zeros)
            padded.append(pad(text["text_embedding"], (0, 0, *rows)))
        return {"text_embedding": torch.stack(padded)}

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        # The pipeline requires masks but does not use them.
        embedding = text["text_embedding"]
        return {"prompt_embeds": embedding, "prompt_attention_mask": embedding.new_ones(embedding.shape[:2])}


class AuraFlowCall(DenoiserCall):
    """The transformer of joint and single blocks."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        return denoiser(
            noisy,
            encoder_hidden_states=conditions["text_embedding"],
            timestep=timesteps / self.num_timesteps,
            return_dict=False,
        )[0]
