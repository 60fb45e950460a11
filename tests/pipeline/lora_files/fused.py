"""The weights of a model with LoRA files, as diffusers adds them."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline


def fused_weights(base: Path, *files: tuple[Path, float]) -> dict[str, torch.Tensor]:
    """Return the denoiser's weights after diffusers has added the LoRAs, one after the other.

    Args:
        base: Folder of a Stable Diffusion.
        files: LoRA files with the strength of each.
    """
    pipeline = StableDiffusionPipeline.from_pretrained(base)
    for file, strength in files:
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
        pipeline.fuse_lora(lora_scale=strength)
        pipeline.unload_lora_weights()
    return dict(pipeline.unet.state_dict())
