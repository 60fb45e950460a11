"""ERNIE-Image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.text import TextConditioner, unpadded
from pipeline.models.worker.text_layers import ALL_ON_DEVICE, LayerOffload


class ErnieConditioner(TextConditioner):
    """The hidden states of a Mistral 3."""

    def load(self, dtype: str, device: str, offload: LayerOffload = ALL_ON_DEVICE) -> Any:
        pipeline = super().load(dtype, device, offload)

        # The pipeline cuts captions at its tokenizer's limit only.
        pipeline.tokenizer.model_max_length = self.family.max_length()
        return pipeline

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        states = encoders.encode_prompt(caption, encoders.text_encoder.device)
        return {"text_embedding": states[0][None]}

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": unpadded(text["text_embedding"], text["text_lengths"])}


class ErnieImageCall(DenoiserCall):
    """The single-stream transformer."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        return denoiser(
            hidden_states=noisy,
            timestep=timesteps,
            text_bth=conditions["text_embedding"],
            text_lens=conditions["text_mask"].sum(dim=1).long(),
            return_dict=False,
        )[0]
