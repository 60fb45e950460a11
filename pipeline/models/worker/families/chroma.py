"""Chroma."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.families.flux import pack, text_ids, unpack
from pipeline.models.worker.text import MASKED_PROMPT, TextConditioner


class MaskedT5Conditioner(TextConditioner):
    """T5's hidden states and the mask of the tokens that count."""

    prompt_names = MASKED_PROMPT

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        embedding, _, mask, *_ = self.encode_prompt(encoders, caption, do_classifier_free_guidance=False)
        return {"text_embedding": embedding, "text_mask": mask}

    def prompt_tensors(self, text: Mapping[str, Any]) -> dict[str, Any]:
        # Attention adds the pipeline's float mask to its scores, so padding would be seen nearly as well as
        # the caption. As a boolean, the mask hides padding.
        return super().prompt_tensors({**text, "text_mask": text["text_mask"].bool()})


class ChromaCall(DenoiserCall):
    """The transformer over packed latents, with a boolean attention mask."""

    def recompute_activations(
        self, denoiser: nn.Module, checkpoint: Callable[..., Any] | None = None
    ) -> None:
        # diffusers 0.42 drops the mask where it recomputes single blocks. The checkpoints are inside the
        # blocks, so hooks of the blocks are outside of them, and `checkpoint` is not needed.
        model = cast("Any", denoiser)
        for block in (*model.transformer_blocks, *model.single_transformer_blocks):
            block.forward = partial(torch_checkpoint, block.forward, use_reentrant=False)

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        text, image = conditions["text_embedding"], pack(self.pipeline, noisy)
        text_mask = conditions["text_mask"].bool()
        image_mask = text_mask.new_ones(image["hidden_states"].shape[:2])
        tokens = denoiser(
            **image,
            timestep=timesteps / self.num_timesteps,
            encoder_hidden_states=text,
            txt_ids=text_ids(text),
            attention_mask=torch.cat([text_mask, image_mask], dim=1),
            return_dict=False,
        )[0]
        return unpack(self.pipeline, tokens, noisy, self.family.vae_factor)
