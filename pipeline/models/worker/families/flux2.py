"""FLUX.2 klein, and what FLUX.2 dev shares with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.text import TextConditioner, chat_prompt


class KleinConditioner(TextConditioner):
    """A Qwen3 behind its chat template; a distilled model ignores the negative prompt."""

    def prompt(self, encoders: Any, caption: str) -> str:
        return chat_prompt(encoders.tokenizer, caption, enable_thinking=False)

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        embedding, _ = self.encode_prompt(encoders, caption)
        return {"text_embedding": embedding}


class Flux2Call(DenoiserCall):
    """The transformer over tokens that are the values of a patched latent, then of the references."""

    def guidance(self, noisy: Tensor, conditions: Conditions) -> Tensor | None:
        """Return the guidance scale (B,), or None if the transformer takes none."""
        return None

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        text = conditions["text_embedding"]
        # The pipeline would create the ids on the CPU, and their copies would wait for the GPU.
        with noisy.device:
            text_ids = self.pipeline._prepare_text_ids(text)
            image_tokens = self._image_tokens(noisy, conditions)
        tokens = denoiser(
            **image_tokens,
            timestep=timesteps / self.num_timesteps,
            guidance=self.guidance(noisy, conditions),
            encoder_hidden_states=text,
            txt_ids=text_ids,
            return_dict=False,
        )[0]
        tokens = tokens[:, : noisy[0, 0].numel()]  # without the references
        return tokens.transpose(1, 2).reshape(noisy.shape)  # tokens are the latent's values, row by row

    def _image_tokens(self, noisy: Tensor, conditions: Conditions) -> dict[str, Tensor]:
        """Return `hidden_states` and `img_ids` of the noisy latent, then of the references."""
        tokens = [self.pipeline._pack_latents(noisy)]
        ids = [self.pipeline._prepare_latent_ids(noisy)]
        if references := conditions.get("references"):
            tokens += [self.pipeline._pack_latents(reference.to(noisy.dtype)) for reference in references]
            reference_ids = self.pipeline._prepare_image_ids([reference[:1] for reference in references])
            ids.append(reference_ids.expand(len(noisy), -1, -1))
        return {"hidden_states": torch.cat(tokens, dim=1), "img_ids": torch.cat(ids, dim=1)}
