from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2KleinPipeline

from pipeline.families import detect
from pipeline.families.tiny import make_tiny_flux2_klein
from pipeline.training.loader import MicroInput
from tests.pipeline.families.whole_job import Case

DOUBLE = ("img_attn_qkv", "img_attn_proj", "img_mlp_0", "img_mlp_2")
DOUBLE += tuple(layer.replace("img", "txt") for layer in DOUBLE)


class KleinCase(Case):
    pipeline_class = Flux2KleinPipeline
    targets = (
        r"transformer_blocks\.\d+\.(attn\.(to|add)_[qkv](_proj)?|attn\.to_out\.0|attn\.to_add_out"
        r"|ff(_context)?\.linear_(in|out))|single_transformer_blocks\.\d+\.attn\.to_(qkv_mlp_proj|out)"
    )

    def make(self, folder: Path) -> None:
        make_tiny_flux2_klein(folder)

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        return {"text_embedding": pipe.encode_prompt(caption)[0]}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        return pipe._encode_vae_image(pixels, generator=None)

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Tokens are rows of latent values; positions are (time, row, column, place in the text)."""
        batch, _, height, width = noisy.shape
        rows = [[0, row, column, 0] for row in range(height) for column in range(width)]
        text = micro.conditions["text_embedding"]
        places = [[0, 0, 0, place] for place in range(text.shape[1])]
        tokens = pipe.transformer(
            noisy.flatten(2).transpose(1, 2),
            text,
            micro.timesteps / 1000,
            torch.tensor([rows] * batch),
            torch.tensor([places] * batch),
        ).sample
        return tokens.transpose(1, 2).reshape(noisy.shape)

    def kohya_keys(self) -> set[str]:
        double = {f"lora_unet_double_blocks_{block}_{layer}" for block in range(2) for layer in DOUBLE}
        single = {f"lora_unet_single_blocks_{block}_linear{layer}" for block in range(2) for layer in (1, 2)}
        return double | single


def test_the_whole_job_of_klein_equals_diffusers_and_its_files_change_the_picture(
    prove: Callable[[Case], None],
) -> None:
    prove(KleinCase())


def test_the_shift_is_the_one_of_the_pipelines_pictures(tmp_path: Path) -> None:
    make_tiny_flux2_klein(tmp_path)
    family = detect(tmp_path)
    scheduler = family.load_noise_scheduler()
    half = torch.tensor([0.5], dtype=torch.float64)
    for edge in (16, 64, 80):  # 64: what the pipeline computes for 1024 px; 80: beyond its 4300 tokens
        got = family.timesteps(scheduler, half, (32, edge, edge)).item()
        tokens = edge * edge
        slow, fast = 0.00016927 * tokens + 0.45666666, 8.73809524e-05 * tokens + 1.89833333
        mu = slow if tokens > 4300 else slow + (fast - slow) * 150 / 190
        expected = 1000 / (1 + torch.exp(torch.tensor(-mu)).item())
        assert got == pytest.approx(expected, abs=1e-2)
