from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import BriaFiboPipeline

from demo.tiny_models import make_tiny_bria_fibo
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
DOUBLE = tuple(f"attn.{layer}" for layer in ATTENTION)
DOUBLE += tuple(f"{side}.net.{layer}" for side in ("ff", "ff_context") for layer in ("0.proj", "2"))
SINGLE = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "proj_out")
WIDTH, LAYERS = 16, 3


class FiboCase(Case):
    pipeline_class = BriaFiboPipeline
    targets = (
        r"transformer_blocks\.\d+\.(attn\.(to|add)_[qkv](_proj)?|attn\.to_out\.0|attn\.to_add_out"
        r"|ff(_context)?\.net\.(0\.proj|2))|single_transformer_blocks\.\d+\.(attn\.to_[qkv]|proj_mlp|proj_out)"
    )

    def make(self, folder: Path) -> None:
        make_tiny_bria_fibo(folder)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        states, _, _, mask, _, layers, _ = pipe.encode_prompt(caption, guidance_scale=1)
        assert torch.equal(states, torch.cat([layers[2], layers[1]], dim=2))
        return {"text_embedding": torch.cat(layers, dim=2), "text_mask": mask}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Return the latent that the end of the pipeline converts back to the raw latent."""
        config = pipe.vae.config
        raw = pipe.vae.encode(pixels[:, :, None]).latent_dist.mode()[:, :, 0]
        mean, std = (torch.tensor(each)[:, None, None] for each in (config.latents_mean, config.latents_std))
        return (raw - mean) / std

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Predict each sample alone, without a mask; the fourth block gets the last text layer again."""
        height, width = noisy.shape[2:]
        places = [[0.0, row, column] for row in range(height) for column in range(width)]
        predictions = []
        for index, text in enumerate(micro.conditions["text_embedding"]):
            length = int(micro.conditions["text_mask"][index].sum())
            layers = text[None, :length].reshape(1, length, LAYERS, WIDTH).unbind(2)
            tokens = pipe.transformer(
                noisy[index : index + 1].flatten(2).transpose(1, 2),
                encoder_hidden_states=torch.cat([layers[2], layers[1]], dim=2),
                text_encoder_layers=[*layers, layers[2]],
                timestep=micro.timesteps[index : index + 1],
                img_ids=torch.tensor(places),
                txt_ids=torch.zeros(length, 3),
            ).sample
            predictions.append(tokens.transpose(1, 2).reshape(1, *noisy.shape[1:]))
        return torch.cat(predictions)

    def kohya_keys(self) -> set[str]:
        double = {f"transformer_blocks.{block}.{layer}" for block in range(2) for layer in DOUBLE}
        single = {f"single_transformer_blocks.{block}.{layer}" for block in range(2) for layer in SINGLE}
        return {f"lora_unet_{module.replace('.', '_')}" for module in double | single}


def test_the_complete_job_equals_diffusers_and_its_files_change_the_picture(
    check_family: Callable[[Case], None],
) -> None:
    check_family(FiboCase())
