"""Sana."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pipeline.models.worker.denoiser import Conditions, DenoiserCall, padding_mask
from pipeline.models.worker.text import MASKED_PROMPT, GemmaConditioner


class SanaConditioner(GemmaConditioner):
    """A Gemma 2 behind the pipeline's instruction."""

    prompt_names = MASKED_PROMPT

    def prompt(self, encoders: Any, caption: str) -> str:
        # The pipeline lower-cases captions.
        return _instruction(encoders) + caption.lower()

    def token_limit(self, encoders: Any, role: str) -> int:
        # As the pipeline computes it, with the instruction.
        return len(encoders.tokenizer.encode(_instruction(encoders))) + self.family.max_length() - 2

    def instruction(self, encoders: Any) -> dict[str, Any]:
        return {"complex_human_instruction": _instruction_lines(encoders)}

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], negative_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        arguments = super().prompt_arguments(pipeline, text, negative_text)

        # The pipeline rejects its default negative prompt next to embeddings. Without binning, it draws in
        # exactly the requested size.
        return {**arguments, "negative_prompt": None, "use_resolution_binning": False}


class SanaCall(DenoiserCall):
    """The linear transformer."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        return denoiser(
            noisy,
            encoder_hidden_states=conditions["text_embedding"],
            encoder_attention_mask=padding_mask(conditions),
            timestep=timesteps * float(self.config.get("timestep_scale", 1.0)),
            return_dict=False,
        )[0]


def _instruction_lines(encoders: Any) -> list[str]:
    # The pipeline has its instruction only as the default of an argument.
    return list(inspect.signature(type(encoders).__call__).parameters["complex_human_instruction"].default)


def _instruction(encoders: Any) -> str:
    return "\n".join(_instruction_lines(encoders))
