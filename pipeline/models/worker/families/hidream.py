"""HiDream."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pipeline.images.geometry import Size
from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.inference import PipelineDrawing
from pipeline.models.worker.text import TextConditioner


class FourEncoderConditioner(TextConditioner):
    """T5, every layer of a Llama, and two pooled CLIPs."""

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        t5, _, llama, _, pooled, _ = self.encode_prompt(encoders, caption, do_classifier_free_guidance=False)
        return {
            "text_embedding": t5,
            "llama_embeddings": llama.transpose(0, 1),
            "pooled_text_embedding": pooled,
        }

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "prompt_embeds_t5": text["text_embedding"],
            "prompt_embeds_llama3": text["llama_embeddings"].transpose(0, 1),
            "pooled_prompt_embeds": text["pooled_text_embedding"],
        }


class HiDreamCall(DenoiserCall):
    """The mixture-of-experts transformer."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        # The transformer predicts latent minus noise; the pipeline negates it too.
        prediction = -denoiser(
            hidden_states=noisy,
            timesteps=timesteps,
            encoder_hidden_states_t5=conditions["text_embedding"],
            encoder_hidden_states_llama3=conditions["llama_embeddings"].transpose(0, 1),
            pooled_embeds=conditions["pooled_text_embedding"],
            return_dict=False,
        )[0]
        return self._unpatch(prediction, noisy) if denoiser.training else prediction

    def _unpatch(self, patches: Tensor, noisy: Tensor) -> Tensor:
        """Return patches (B, C, S, p p), which the transformer returns in training mode, in noisy's shape."""
        edge = int(self.config["patch_size"])
        batch, channels, height, width = noisy.shape
        rows, columns = height // edge, width // edge

        # For images that are not square, S includes padding behind the image's own patches.
        image = patches[:, :, : rows * columns].reshape(batch, channels, rows, columns, edge, edge)
        return image.transpose(3, 4).reshape(noisy.shape)


class HiDreamDrawing(PipelineDrawing):
    """Previews in any size."""

    def allow_size(self, pipeline: Any, size: Size) -> None:
        # The pipeline scales every size to the area of its default size.
        edge = math.sqrt(size.height * size.width) / pipeline.vae_scale_factor
        pipeline.default_sample_size = edge * (1 + 1e-6)  # the pipeline rounds down
