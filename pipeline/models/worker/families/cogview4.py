"""CogView4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.pipelines.cogview4.pipeline_cogview4 import calculate_shift
from torch import Tensor, nn

from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.noise import FlowProcess
from pipeline.models.worker.text import TextConditioner, unpadded

# Conditions by the transformer's argument.
_SIZE_ARGUMENTS = {
    "original_size": "original_size_hw",
    "target_size": "target_size_hw",
    "crop_coords": "crop_top_left",
}


class CogView4Conditioner(TextConditioner):
    """The hidden states of a GLM."""

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        embedding, _ = self.encode_prompt(encoders, caption, do_classifier_free_guidance=False)
        return {"text_embedding": embedding}

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": unpadded(text["text_embedding"], text["text_lengths"])[0].unsqueeze(0)}


class CogView4Call(DenoiserCall):
    """The transformer conditioned on sizes and crop."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        # One call per sample, because the transformer takes no mask that hides padding.
        texts = unpadded(conditions["text_embedding"], conditions["text_lengths"])
        predictions: list[Tensor] = []
        for index, text in enumerate(texts):
            sample = slice(index, index + 1)
            sizes = {name: conditions[source][sample].float() for name, source in _SIZE_ARGUMENTS.items()}
            prediction = denoiser(
                hidden_states=noisy[sample],
                encoder_hidden_states=text[None],
                timestep=timesteps[sample],
                **sizes,
                return_dict=False,
            )
            predictions.append(prediction[0])
        return torch.cat(predictions)


class CogView4Process(FlowProcess):
    """Flow matching with the pipeline's shift, which grows with the square root of the number of tokens."""

    def size_shift(self, scheduler: Any, latent_shape: tuple[int, int, int]) -> float:
        config = scheduler.config
        return calculate_shift(
            self.num_tokens(latent_shape),
            config.get("base_image_seq_len", 256),
            config.get("base_shift", 0.25),
            config.get("max_shift", 0.75),
        )
