"""Qwen-Image 2.1."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ProcessorMixin

from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.drawing import PipelineDrawing
from pipeline.models.worker.text import TextConditioner, count_within_template
from pipeline.models.worker.vae import FrameCodec, Posterior

_SLOT_TOKENS = 4
"""Number of image tokens that one position of the transformer's `img_mask` stands for."""


class CaptionProcessor(ProcessorMixin):
    """A processor without image and video processors, which encodes captions as `Qwen3VLProcessor` does."""

    def __init__(self, tokenizer: Any = None, chat_template: str | None = None) -> None:
        """Combine a tokenizer with the chat template of the processor."""
        super().__init__(tokenizer, chat_template=chat_template)

    def apply_chat_template(self, conversation: Any, *args: Any, **options: Any) -> Any:
        """Return a batch also for a single conversation, as `Qwen3VLProcessor` does."""
        return super().apply_chat_template([conversation], *args, **options)


class QwenImage21Conditioner(TextConditioner):
    """A Qwen3-VL behind the pipeline's template; the hidden states of the system message are dropped."""

    def load_tokenizer(self, role: str) -> CaptionProcessor:
        """See `TextConditioner.load_tokenizer`."""
        tokenizer = super().load_tokenizer(role)
        return CaptionProcessor(tokenizer, chat_template=tokenizer.chat_template)

    def prompt(self, encoders: Any, caption: str) -> str:
        """See `TextConditioner.prompt`; the pipeline replaces an empty caption by a space."""
        return encoders.prompt_template_t2i.format(caption or " ")

    def token_limit(self, encoders: Any, role: str) -> int:
        """See `TextConditioner.token_limit`; the system message is not part of the embedding."""
        system_message, *_ = encoders.prompt_template_t2i.partition("<|im_start|>user")
        num_dropped = len(encoders.processor.tokenizer(system_message).input_ids)
        return super().token_limit(encoders, role) + num_dropped

    def count_tokens(self, encoders: Any, role: str, caption: str) -> tuple[int, int, int | None]:
        """Count tokens, and cut the caption's end so that the end of the template remains."""
        limit, caption_start = self.token_limit(encoders, role), encoders.prompt_template_t2i.index("{}")
        spans_of = partial(self._token_spans, encoders)
        return count_within_template(spans_of, caption, caption_start=caption_start, limit=limit)

    def _token_spans(self, encoders: Any, caption: str) -> list[tuple[int, int]]:
        """Return (first character, last character + 1) of each token of the prompt."""
        options = {"return_offsets_mapping": True, "verbose": False}
        return encoders.processor.tokenizer(self.prompt(encoders, caption), **options)["offset_mapping"]

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """See `TextConditioner.embed`; the pipeline itself cuts nothing."""
        _, _, cut_from = self.count_tokens(encoders, "processor", caption)
        embedding, *_ = encoders.encode_prompt(caption[:cut_from], device=encoders.text_encoder.device)
        return {"text_embedding": embedding}

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """See `TextConditioner.prompt_tensors`."""
        (length,) = text["text_lengths"]
        return {"prompt_embeds": text["text_embedding"][:, :length]}

    def guidance_arguments(self, scale: float) -> dict[str, Any]:
        """Return `true_cfg_scale`, which scales the guidance away from the negative prompt."""
        return {"true_cfg_scale": scale}


class QwenImage21Call(DenoiserCall):
    """The transformer over the caption, then the latent's values as tokens, row by row."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """See `DenoiserCall.predict`.

        Captions of different lengths are predicted one at a time: the transformer counts padding when it
        places the image behind the caption, so a prediction would depend on the batch's longest caption.
        """
        text, lengths = conditions["text_embedding"], conditions["text_lengths"]
        if len(set(lengths)) == 1:
            return _predict(denoiser, noisy, timesteps / self.num_timesteps, text)
        predictions: list[Tensor] = []
        for index, length in enumerate(lengths):
            sample = slice(index, index + 1)
            sigma = timesteps[sample] / self.num_timesteps
            predictions.append(_predict(denoiser, noisy[sample], sigma, text[sample, :length]))
        return torch.cat(predictions)


def _predict(denoiser: nn.Module, noisy: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    """Return the prediction for captions of one length."""
    batch, _, height, width = noisy.shape
    tokens = noisy.flatten(2).transpose(1, 2)
    is_image = torch.zeros(batch, text.shape[1], dtype=torch.bool, device=noisy.device)
    slots = is_image.new_ones(batch, tokens.shape[1] // _SLOT_TOKENS)
    prediction = denoiser(
        hidden_states=tokens,
        timestep=sigma,
        encoder_hidden_states=text,
        encoder_hidden_states_mask=None,
        img_shapes=[[(1, height, width)]] * batch,
        img_mask=torch.cat([is_image, slots], dim=1),
        return_dict=False,
    )[0]
    return prediction[:, -tokens.shape[1] :].transpose(1, 2).reshape(noisy.shape)


class OpaqueFrameCodec(FrameCodec):
    """A VAE for frames with an alpha channel: images are opaque, and decoded transparency is dropped."""

    def _encode(self, vae: Any, pixels: Tensor) -> Posterior:
        alpha = torch.ones_like(pixels[:, :1])
        return super()._encode(vae, torch.cat([pixels, alpha], dim=1))

    def _decode(self, vae: Any, raw_latent: Tensor) -> Tensor:
        return super()._decode(vae, raw_latent)[:, :3]


class QwenImage21Drawing(PipelineDrawing):
    """The pipeline, which reads its template's length from the processor even if prompts are embeddings."""

    def further_components(self) -> dict[str, Any]:
        """See `PipelineDrawing.further_components`."""
        return {"processor": self.text.load_tokenizer("processor")}
