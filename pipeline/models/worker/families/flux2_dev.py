"""FLUX.2 dev."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers.pipelines.flux2.pipeline_flux2 import format_input
from torch import Tensor

from pipeline.models.worker.denoiser import DEFAULT_GUIDANCE, Conditions
from pipeline.models.worker.families.flux2 import Flux2Call, KleinConditioner


class DevConditioner(KleinConditioner):
    """A Mistral 3 behind its chat template and the pipeline's system message."""

    def prompt(self, encoders: Any, caption: str) -> str:
        messages = format_input([caption], encoders.system_message)
        return encoders.tokenizer.apply_chat_template(messages, tokenize=False)[0]

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], negative_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        # Guidance is distilled, so the pipeline needs no negative prompt.
        return self.prompt_tensors(text)


class GuidedFlux2Call(Flux2Call):
    """FLUX.2's transformer with a guidance scale."""

    def guidance(self, noisy: Tensor, conditions: Conditions) -> Tensor:
        """Return the guidance scale (B,) of training."""
        return noisy.new_full((len(noisy),), conditions.get("guidance", DEFAULT_GUIDANCE))
