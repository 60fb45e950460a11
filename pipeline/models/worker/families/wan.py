"""Wan 2.1, for videos of one frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor, nn

from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.inference import PipelineDrawing
from pipeline.models.worker.text import TextConditioner

if TYPE_CHECKING:
    from PIL import Image


class WanConditioner(TextConditioner):
    """A UMT5's hidden states of the cleaned caption, followed by zeros."""

    def prompt(self, encoders: Any, caption: str) -> str:
        # The pipeline cleans white space and HTML entities, and broken Unicode if ftfy is installed.
        return prompt_clean(caption)

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        embedding, _ = self.encode_prompt(encoders, caption, do_classifier_free_guidance=False)
        num_tokens, num_cut, _ = self.count_tokens(encoders, "tokenizer", caption)
        return {"text_embedding": embedding[:, : num_tokens - num_cut]}


class WanCall(DenoiserCall):
    """The transformer over a video of one frame."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        prediction = denoiser(
            hidden_states=noisy.unsqueeze(2),
            timestep=timesteps,
            encoder_hidden_states=conditions["text_embedding"],
            return_dict=False,
        )[0]
        return prediction.squeeze(2)


class WanDrawing(PipelineDrawing):
    """Previews of one frame."""

    def call(self, pipeline: Any, arguments: Mapping[str, Any]) -> Sequence[Image.Image]:
        videos, *_ = pipeline(**arguments, num_frames=1, output_type="pil", return_dict=False)
        return [frames[0] for frames in videos]
