"""Bria FIBO 2."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.pipelines.bria_fibo2.pipeline_bria_fibo2 import DEFAULT_NEGATIVE_PROMPT
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle
from transformers import Qwen2VLImageProcessorPil

from pipeline.models.families.bria_fibo2 import NUM_BUNDLES, PERCEIVER_BUNDLE
from pipeline.models.worker.denoiser import Conditions, DenoiserCall, padding_mask
from pipeline.models.worker.families.qwen_image_edit import CaptionImageProcessor
from pipeline.models.worker.text import TextConditioner

_PATCH = 2
"""Edge, in values of the VAE's latent, of a patch in the stored latent."""


class BriaFibo2Conditioner(TextConditioner):
    """A Qwen3-VL; JSON captions are cleaned as the pipeline's call does, before `encode_prompt`.

    The empty caption is embedded as the pipeline's default negative prompt, a JSON caption without values.
    """

    def load_tokenizer(self, role: str) -> CaptionImageProcessor:
        """See `TextConditioner.load_tokenizer`."""
        images = Qwen2VLImageProcessorPil(**self.family.image_processor_settings())
        return CaptionImageProcessor(super().load_tokenizer(role), images)

    def cleaned(self, encoders: Any, caption: str) -> str:
        """Return the caption as the pipeline gives it to `encode_prompt`."""
        if not caption:
            return DEFAULT_NEGATIVE_PROMPT
        content, _ = encoders._parse_prompt(caption)
        if isinstance(content, str):
            return caption
        return json.dumps(content or {}, separators=(",", ":"), ensure_ascii=False)

    def prompt(self, encoders: Any, caption: str) -> str:
        """See `TextConditioner.prompt`."""
        return encoders.prompt_template_encode.format(self.cleaned(encoders, caption))

    def count_tokens(self, encoders: Any, role: str, caption: str) -> tuple[int, int, int | None]:
        """See `TextConditioner.count_tokens`; the first cut character is counted in the cleaned caption."""
        prompt, limit = self.prompt(encoders, caption), self.token_limit(encoders, role)
        options = {"return_offsets_mapping": True, "verbose": False}
        spans = encoders.processor.tokenizer(prompt, **options)["offset_mapping"]
        if len(spans) <= limit:
            return len(spans), 0, None
        offset = spans[limit][0] - encoders.prompt_template_encode.index("{}")
        return len(spans), len(spans) - limit, min(max(offset, 0), len(caption))

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """See `TextConditioner.embed`; images of the texts in a JSON caption are not drawn."""
        prompt = self.cleaned(encoders, caption)
        bundles, _ = encoders.encode_prompt(prompt, device=encoders.text_encoder.device)
        return {"text_embedding": bundles[:, 1:].transpose(1, 2).flatten(2)}

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """See `TextConditioner.prompt_tensors`."""
        (length,) = text["text_lengths"]
        return {"prompt_embeds": _bundles(text)[:, :, :length]}


class BriaFibo2Call(DenoiserCall):
    """The transformer over latents that are not in patches."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """See `DenoiserCall.predict`."""
        prediction = denoiser(
            hidden_states=pixel_shuffle(noisy, _PATCH),
            timestep=timesteps / self.num_timesteps,
            encoder_hidden_states=_bundles(conditions),
            encoder_attention_mask=padding_mask(conditions),
            context_latents=None,
            return_dict=False,
        )[0]
        return pixel_unshuffle(prediction, _PATCH)


def _bundles(text: Mapping[str, Any]) -> Tensor:
    """Return the bundle of the Perceiver and that of each injection block, (B, 6, T, 3 D)."""
    injected = text["text_embedding"].unflatten(2, (NUM_BUNDLES, -1)).transpose(1, 2)
    return torch.cat([injected[:, PERCEIVER_BUNDLE : PERCEIVER_BUNDLE + 1], injected], dim=1)
