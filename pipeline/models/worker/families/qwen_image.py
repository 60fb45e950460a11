"""Qwen-Image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pipeline.models.worker.denoiser import Conditions, DenoiserCall, padding_mask
from pipeline.models.worker.text import TextConditioner

_TOKENS = 512
"""`max_sequence_length` of the pipeline's call, template not included."""

_PATCH = 2


class QwenConditioner(TextConditioner):
    """A Qwen2.5-VL behind the pipeline's template, whose hidden states are dropped."""

    def prompt(self, encoders: Any, caption: str) -> str:
        """See `TextConditioner.prompt`."""
        return encoders.prompt_template_encode.format(caption)

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """See `TextConditioner.embed`."""
        embedding, _ = self.encode_prompt(encoders, caption, max_sequence_length=_TOKENS)
        return {"text_embedding": embedding}

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """See `TextConditioner.prompt_tensors`."""
        (length,) = text["text_lengths"]
        return {
            "prompt_embeds": text["text_embedding"][:, :length],
            "prompt_embeds_mask": text["text_mask"][:, :length].bool(),
        }

    def guidance_arguments(self, scale: float) -> dict[str, Any]:
        """Add `true_cfg_scale`, which scales the guidance away from the negative prompt."""
        return {**super().guidance_arguments(scale), "true_cfg_scale": scale}


class QwenImageCall(DenoiserCall):
    """The transformer over packed latents, with a text mask."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """See `DenoiserCall.predict`."""
        batch, channels, height, width = noisy.shape
        tokens = denoiser(
            hidden_states=self.pipeline._pack_latents(noisy, batch, channels, height, width),
            timestep=timesteps / self.num_timesteps,
            encoder_hidden_states=conditions["text_embedding"],
            encoder_hidden_states_mask=padding_mask(conditions),
            img_shapes=[[(1, height // _PATCH, width // _PATCH)]] * batch,
            return_dict=False,
        )[0]
        factor = self.family.vae_factor
        return self.pipeline._unpack_latents(tokens, height * factor, width * factor, factor).squeeze(2)
