"""The expected results of Qwen-Image's transformer, from its pipelines and by hand."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case

IMAGE = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_k_proj", "attn.add_v_proj")
IMAGE += ("img_mlp.net.0.proj", "img_mlp.net.2")
TEXT = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
LAYERS = [f"transformer_blocks.{block}.{layer}" for block in range(2) for layer in IMAGE]
LAYERS += [f"transformer_blocks.0.{layer}" for layer in TEXT]  # the text output of the last block is unused


class QwenImageCase(Case):
    targets: ClassVar[list[str]] = LAYERS
    previewing: ClassVar[dict[str, Any]] = {"negative_prompt": ""}

    def guidance_arguments(self, scale: float) -> dict[str, Any]:
        return {"true_cfg_scale": scale, "guidance_scale": None}

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        embedding, mask = pipe.encode_prompt(caption, max_sequence_length=512)
        assert mask is None
        stored, mask = torch.zeros(1, 512, embedding.shape[2]), torch.zeros(1, 512)
        stored[0, : embedding.shape[1]] = embedding
        mask[0, : embedding.shape[1]] = 1
        return {"text_embedding": stored, "text_mask": mask}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        config = pipe.vae.config
        raw = pipe.vae.encode(pixels[:, :, None]).latent_dist.mode()
        mean, std = (
            torch.tensor(each).view(1, -1, 1, 1, 1) for each in (config.latents_mean, config.latents_std)
        )
        return ((raw - mean) / std)[:, :, 0]

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone, without a mask; tokens are 2x2 patches in row order, channels first."""
        height, width = noisy.shape[2:]
        predictions = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            patches = torch.nn.functional.unfold(noisy[index : index + 1], 2, stride=2).transpose(1, 2)
            length = int(micro.conditions["text_mask"][index].sum())
            tokens = pipe.transformer(
                patches,
                encoder_hidden_states=text[None, :length],
                timestep=micro.timesteps[index : index + 1] / 1000,
                img_shapes=[[(1, height // 2, width // 2)]],
            ).sample
            predictions.append(torch.nn.functional.fold(tokens.transpose(1, 2), (height, width), 2, stride=2))
        return torch.cat(predictions)

    def kohya_keys(self) -> set[str]:
        return {f"lora_unet_{module.replace('.', '_')}" for module in LAYERS}
