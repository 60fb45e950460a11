"""The expected results of Stable Diffusion XL and Kolors, whose UNets are conditioned on sizes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch

from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case

ATTENTIONS = {
    "down_blocks.1.attentions.0": "input_blocks.4.1",
    "down_blocks.1.attentions.1": "input_blocks.5.1",
    "mid_block.attentions.0": "middle_block.1",
    "up_blocks.0.attentions.0": "output_blocks.0.1",
    "up_blocks.0.attentions.1": "output_blocks.1.1",
    "up_blocks.0.attentions.2": "output_blocks.2.1",
}
"""Attention blocks by their names in Stability AI's sd_xl_base.yaml, of which these are the first levels."""

LAYERS = [
    f"transformer_blocks.{block}.{attention}.{layer}"
    for block in range(2)
    for attention in ("attn1", "attn2")
    for layer in ("to_q", "to_k", "to_v", "to_out.0")
]


class SizedUNetCase(Case):
    targets: ClassVar[list[str]] = ["to_q", "to_k", "to_v", "to_out.0"]

    @abstractmethod
    def pooled_width(self, pipe: Any) -> int:
        """Return the width of the pooled text, an argument of the pipeline's function for time ids."""

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        embedding, _, pooled, _ = pipe.encode_prompt(caption, do_classifier_free_guidance=False)
        return {"text_embedding": embedding, "pooled_text_embedding": pooled}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        return pipe.vae.encode(pixels).latent_dist.mean * pipe.vae.config.scaling_factor

    def target(self, micro: MicroInput) -> torch.Tensor:
        return micro.noise

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Compute time ids with the pipeline's own function, one sample at a time."""
        names = ("original_size_hw", "crop_top_left", "target_size_hw")
        arguments = {"dtype": torch.float32, "text_encoder_projection_dim": self.pooled_width(pipe)}
        sizes = zip(*(micro.conditions[name].tolist() for name in names), strict=True)
        ids = [pipe._get_add_time_ids(*map(tuple, row), **arguments) for row in sizes]
        pooled = micro.conditions["pooled_text_embedding"]
        added = {"text_embeds": pooled, "time_ids": torch.cat(ids)}
        text = micro.conditions["text_embedding"]
        return pipe.unet(noisy, micro.timesteps, text, added_cond_kwargs=added).sample

    def comfyui_keys(self, modules: set[str]) -> set[str]:
        assert modules == {f"{place}.{layer}" for place in ATTENTIONS for layer in LAYERS}
        return {f"diffusion_model.{place}.{layer}" for place in ATTENTIONS.values() for layer in LAYERS}
