"""Kandinsky 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.pipelines.kandinsky5.pipeline_kandinsky_t2i import prompt_clean
from torch import Tensor, nn

from pipeline.images.geometry import Size
from pipeline.models.families.kandinsky5 import TEMPLATE_TOKENS, TOKENS
from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.inference import PipelineDrawing
from pipeline.models.worker.text import TextConditioner, token_spans

# Tokens at the end that the pipeline excludes when it measures how much text to cut.
_NUM_END_MARKS = 2


class QwenAndClipConditioner(TextConditioner):
    """A Qwen2.5-VL behind the pipeline's template, and a pooled CLIP."""

    def prompt(self, encoders: Any, caption: str) -> str:
        # The pipeline cleans white space and HTML entities.
        return encoders.prompt_template.format(prompt_clean(caption))

    def count_tokens(self, encoders: Any, role: str, caption: str) -> tuple[int, int, int | None]:
        """Return the number of tokens, how many are cut, and the index of the cut in the cleaned caption."""
        prompt, limit = self.prompt(encoders, caption), self.token_limit(encoders, role)
        spans = token_spans(encoders.tokenizer, prompt)
        if len(spans) <= limit:
            return len(spans), 0, None

        # The pipeline shortens a long text in two steps, which are repeated here. First it decodes the tokens
        # above the limit, and removes as many characters from the end of the text.
        tokens = encoders.tokenizer(prompt)["input_ids"][TEMPLATE_TOKENS:-_NUM_END_MARKS]
        removed = encoders.tokenizer.decode(tokens[TOKENS - _NUM_END_MARKS :])
        end = len(prompt) - len(removed)

        # Then it tokenizes the rest again, and ignores any tokens that still exceed the limit.
        rest = token_spans(encoders.tokenizer, prompt[:end])
        end = rest[limit][0] if len(rest) > limit else end
        num_cut = sum(span_end > end for _, span_end in spans)
        caption_start = encoders.prompt_template.index("{}")
        return len(spans), num_cut, min(max(end - caption_start, 0), len(caption))

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        embedding, pooled, _ = self.encode_prompt(encoders, caption, max_sequence_length=TOKENS)
        return {"text_embedding": embedding, "pooled_text_embedding": pooled}

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        (length,) = text["text_lengths"]
        return {
            "prompt_embeds_qwen": text["text_embedding"][:, :length],
            "prompt_embeds_clip": text["pooled_text_embedding"],
            "prompt_cu_seqlens": torch.tensor([0, length], dtype=torch.int32),
        }


class Kandinsky5Call(DenoiserCall):
    """The transformer for videos, here of one frame."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        edge = self.family.size_multiple() // self.family.vae_factor
        grid = (1, noisy.shape[2] // edge, noisy.shape[3] // edge)
        visual_positions = [torch.arange(count, device=noisy.device) for count in grid]

        # One call per sample, because the transformer takes no text mask.
        predictions: list[Tensor] = []
        for index, length in enumerate(conditions["text_lengths"]):
            sample = slice(index, index + 1)
            prediction = denoiser(
                hidden_states=noisy[sample].permute(0, 2, 3, 1)[:, None].contiguous(),
                encoder_hidden_states=conditions["text_embedding"][sample, :length],
                pooled_projections=conditions["pooled_text_embedding"][sample],
                timestep=timesteps[sample],
                visual_rope_pos=visual_positions,
                text_rope_pos=torch.arange(length, device=noisy.device),
                return_dict=False,
            )
            predictions.append(prediction[:, 0].permute(0, 3, 1, 2))
        return torch.cat(predictions)


class Kandinsky5Drawing(PipelineDrawing):
    """Previews in any size."""

    def allow_size(self, pipeline: Any, size: Size) -> None:
        # The pipeline draws only in the sizes of this list.
        pipeline.resolutions = [(size.width, size.height)]
