"""Base model of the race: the layout of Stable Diffusion 1.5 with fewer channels, and random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.parts import assemble, clip, write_clip_tokenizer

CHANNELS = (64, 128, 256, 256)
"""Channels of the UNet's four levels. One step at 256 px takes about half a second on two cores."""

TEXT_WIDTH = 256


def make_base(folder: Path) -> None:
    """Write the model as a diffusers folder; equal code gives equal bytes."""
    from diffusers import DDPMScheduler

    scheduler = partial(
        DDPMScheduler,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        steps_offset=1,
    )
    assemble(
        folder,
        "StableDiffusionPipeline",
        {
            "vae": _vae,
            "unet": _unet,
            "text_encoder": partial(clip, width=TEXT_WIDTH, layers=12),
            "scheduler": scheduler,
        },
        tokenizers={"tokenizer": write_clip_tokenizer},
        seed=0,
        index={
            "feature_extractor": [None, None],
            "image_encoder": [None, None],
            "requires_safety_checker": False,
            "safety_checker": [None, None],
        },
    )
    _name_as_published(folder / "text_encoder" / "model.safetensors")


def _name_as_published(text_encoder: Path) -> None:
    """Add the prefix that the tensors of published CLIP text encoders have, and older transformers need."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(text_encoder)
    named = {f"text_model.{name.removeprefix('text_model.')}": each for name, each in tensors.items()}
    save_file(named, text_encoder, metadata={"format": "pt"})


def _unet() -> Any:
    from diffusers import UNet2DConditionModel

    # Everything else has the value of Stable Diffusion 1.5, which is the default of the class.
    return UNet2DConditionModel(sample_size=64, block_out_channels=CHANNELS, cross_attention_dim=TEXT_WIDTH)


def _vae() -> Any:
    from diffusers import AutoencoderKL

    sizes: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (32, 64, 128, 128),
        "layers_per_block": 2,
        "sample_size": 512,
    }
    return AutoencoderKL(**sizes)
