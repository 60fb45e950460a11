"""FLUX.2 klein, and what FLUX.2 dev shares with it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.text import TextConditioner, chat_prompt


class KleinConditioner(TextConditioner):
    """A Qwen3 behind its chat template; a distilled model ignores the negative prompt."""

    def prompt(self, encoders: Any, caption: str) -> str:
        """See `TextConditioner.prompt`."""
        return chat_prompt(encoders.tokenizer, caption, enable_thinking=False)

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """See `TextConditioner.embed`."""
        embedding, _ = self.encode_prompt(encoders, caption)
        return {"text_embedding": embedding}


class Flux2Call(DenoiserCall):
    """The transformer over tokens that are the values of a patched latent."""

    def guidance(self, noisy: Tensor) -> Tensor | None:
        """Return the guidance scale (B,), or None if the transformer takes none."""
        return None

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """See `DenoiserCall.predict`."""
        text = conditions["text_embedding"]
        tokens = denoiser(
            hidden_states=self.pipeline._pack_latents(noisy),
            timestep=timesteps / self.num_timesteps,
            guidance=self.guidance(noisy),
            encoder_hidden_states=text,
            txt_ids=self.pipeline._prepare_text_ids(text).to(noisy.device),
            img_ids=self.pipeline._prepare_latent_ids(noisy).to(noisy.device),
            return_dict=False,
        )[0]
        return tokens.transpose(1, 2).reshape(noisy.shape)  # tokens are the latent's values, row by row
