"""The expected results of FLUX.1 dev and Kontext."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FluxPipeline

from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case

DOUBLE = ("img_attn_qkv", "img_attn_proj", "img_mlp_0", "img_mlp_2")
DOUBLE += tuple(layer.replace("img", "txt") for layer in DOUBLE)


class FluxCase(Case):
    pipeline_class = FluxPipeline
    targets = (
        r"transformer_blocks\.\d+\.(attn\.(to|add)_[qkv](_proj)?|attn\.to_out\.0|attn\.to_add_out"
        r"|ff(_context)?\.net\.(0\.proj|2))|single_transformer_blocks\.\d+\.(attn\.to_[qkv]|proj_mlp|proj_out)"
    )
    guidance: float | None = 1.0

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        embedding, pooled, _ = pipe.encode_prompt(caption, caption)
        return {"text_embedding": embedding, "pooled_text_embedding": pooled}

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Call the transformer with 2x2 patches in row order, each flattened with channels first."""
        batch, _, height, width = noisy.shape
        patches = torch.nn.functional.unfold(noisy, 2, stride=2).transpose(1, 2)
        ids = [[0.0, row, column] for row in range(height // 2) for column in range(width // 2)]
        text = micro.conditions["text_embedding"]
        tokens = pipe.transformer(
            patches,
            text,
            micro.conditions["pooled_text_embedding"],
            micro.timesteps / 1000,
            torch.tensor(ids),
            torch.zeros(text.shape[1], 3),
            None if self.guidance is None else torch.full((batch,), self.guidance),
        ).sample
        return torch.nn.functional.fold(tokens.transpose(1, 2), (height, width), 2, stride=2)

    def kohya_keys(self) -> set[str]:
        double = {f"lora_unet_double_blocks_{block}_{layer}" for block in range(2) for layer in DOUBLE}
        single = {f"lora_unet_single_blocks_{block}_linear{layer}" for block in range(2) for layer in (1, 2)}
        return double | single
