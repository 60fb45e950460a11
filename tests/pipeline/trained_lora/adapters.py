"""Helpers that read an adapter's weights, and load its files with diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import StableDiffusionPipeline
from torch import Tensor, nn

from pipeline.trained_lora.worker.adapter import lora


def delta_weights(network: nn.Module, adapter: str = "default") -> dict[str, Tensor]:
    """Return the delta weight of each adapted module by module name."""
    return {name: compute() for name, compute in lora.delta_weights(network, adapter).items()}


def unet_pipeline(base: Path) -> Any:
    """Load the pipeline of Stable Diffusion with its UNet alone, which loads LoRA files."""
    unused = ("vae", "text_encoder", "tokenizer", "feature_extractor", "safety_checker", "image_encoder")
    return StableDiffusionPipeline.from_pretrained(base, **dict.fromkeys(unused))
