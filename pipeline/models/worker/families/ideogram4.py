"""Ideogram 4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models.families.ideogram4 import SECOND_TRANSFORMER
from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.inference import PipelineDrawing
from pipeline.models.worker.loading import load_component
from pipeline.models.worker.noise import FlowProcess
from pipeline.models.worker.text import CachedPromptConditioner, chat_prompt, count_within_template

# The pipeline's schedule: the edge of the picture that has a shift of zero, `std`, and logarithms of the
# lowest and the highest ratio of noise variance to signal variance.
_BASE_PX = 512
_SPREAD = 1.5
_LOG_NOISE = -15.0, 18.0


class IdeogramConditioner(CachedPromptConditioner):
    """Thirteen layers of a Qwen3-VL behind its chat template."""

    def prompt(self, encoders: Any, caption: str) -> str:
        return chat_prompt(encoders.tokenizer, [{"type": "text", "text": caption}])

    def count_tokens(self, encoders: Any, role: str, caption: str) -> tuple[int, int, int | None]:
        # The pipeline itself rejects a caption that is too long. The end of the template must not be cut.
        limit, caption_start = self.token_limit(encoders, role), self.prompt(encoders, "|").index("|")
        spans_of = partial(self._token_spans, encoders)
        return count_within_template(spans_of, caption, caption_start=caption_start, limit=limit)

    def _token_spans(self, encoders: Any, caption: str) -> list[tuple[int, int]]:
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        return encoders.tokenizer(self.prompt(encoders, caption), **options)["offset_mapping"]

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        _, _, cut_from = self.count_tokens(encoders, "tokenizer", caption)
        kept = caption[:cut_from]
        length = len(self._token_spans(encoders, kept))

        # `encode_prompt` also places a picture behind the text, here the smallest one.
        states, *_ = encoders.encode_prompt(kept, 1, 1, length, encoders.text_encoder.device)
        return {"text_embedding": states[:, :length]}

    def encoded_prompt(
        self,
        pipeline: Any,
        text: Mapping[str, Tensor],
        negative_text: Mapping[str, Tensor],
        arguments: Mapping[str, Any],
    ) -> tuple[Any, ...]:
        # The picture follows the caption. Guidance uses the second transformer, which sees no text.
        states = text["text_embedding"][:, : arguments["max_sequence_length"]]
        grid = arguments["grid_h"], arguments["grid_w"]
        picture = states.new_zeros(1, math.prod(grid), states.shape[2])
        length = states.shape[1]
        ids = pipeline._prepare_ids([length], *grid, length, states.device)
        return torch.cat([states, picture], dim=1), *ids

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], negative_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        arguments = super().prompt_arguments(pipeline, text, negative_text)
        (length,) = text["text_lengths"]

        # Without a schedule, the pipeline uses one guidance scale for all steps.
        return {**arguments, "max_sequence_length": length, "guidance_schedule": None}


class IdeogramCall(DenoiserCall):
    """The first transformer, over text and picture in one sequence."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        text, lengths = conditions["text_embedding"], list(conditions["text_lengths"])
        batch, longest, width = text.shape
        tokens = noisy.flatten(2).transpose(1, 2)

        # Padding precedes the caption.
        states = text.new_zeros(batch, longest + tokens.shape[1], width)
        for index, length in enumerate(lengths):
            states[index, longest - length : longest] = text[index, :length]

        positions, segments, roles = self.pipeline._prepare_ids(
            lengths, *noisy.shape[2:], longest, noisy.device
        )
        prediction = denoiser(
            hidden_states=torch.cat([tokens.new_zeros(batch, longest, tokens.shape[2]), tokens], dim=1),
            timestep=1.0 - timesteps / self.num_timesteps,
            encoder_hidden_states=states,
            position_ids=positions,
            segment_ids=segments,
            indicator=roles,
            return_dict=False,
        )[0]
        # The transformer takes `1 - t / num_timesteps` as time and predicts latent minus noise.
        return -prediction[:, longest:].transpose(1, 2).reshape(noisy.shape)


class IdeogramProcess(FlowProcess):
    """Flow matching with the pipeline's own schedule."""

    def shift_sigma(self, scheduler: Any, sigma: Tensor, latent_shape: tuple[int, int, int]) -> Tensor:
        # Logit-normal levels then have the density of the pipeline's steps.
        pixels = self.family.size_multiple() ** 2 * latent_shape[1] * latent_shape[2]
        mu = 0.5 * math.log(pixels / _BASE_PX**2)
        low, high = (1.0 / (1.0 + math.exp(-0.5 * ratio)) for ratio in _LOG_NOISE)
        return torch.sigmoid(mu + _SPREAD * torch.logit(sigma)).clamp(low, high)


class IdeogramDrawing(PipelineDrawing):
    """The pipeline with both transformers."""

    def load_pipeline(self, *, denoiser: nn.Module | None = None, dtype: str, device: str) -> Any:
        pipeline = super().load_pipeline(denoiser=denoiser, dtype=dtype, device=device)

        # The first transformer may be the one in training, with another dtype than loaded networks.
        first_dtype = str(pipeline.transformer.dtype).removeprefix("torch.")
        second = load_component(self.family, SECOND_TRANSFORMER, first_dtype, device)
        pipeline.register_modules(**{SECOND_TRANSFORMER: second})
        return pipeline
