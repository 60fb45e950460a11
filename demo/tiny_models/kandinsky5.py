"""A tiny Kandinsky 5 for images, with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.language import qwen2_5_vl, write_qwen_tokenizer
from demo.tiny_models.parts import (
    TEXT_WIDTH,
    assemble,
    clip,
    flow_schedule,
    vae,
    write_clip_tokenizer,
    write_json,
)

_CHANNELS = 16
_PATCH_PX = 14


def make_tiny_kandinsky5(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `Kandinsky5T2IPipeline.from_pretrained(folder)` loads it if torchvision is installed, which the image
    processor requires. Its transformer takes pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    assemble(
        folder,
        "Kandinsky5T2IPipeline",
        {
            "vae": partial(vae, channels=_CHANNELS, scaling_factor=0.3611, shift_factor=0.1159, quant=False),
            "transformer": _transformer,
            "text_encoder": partial(qwen2_5_vl, width=TEXT_WIDTH),
            "text_encoder_2": clip,
            "scheduler": partial(flow_schedule, shift=3.0),
        },
        tokenizers={"tokenizer": _write_processor, "tokenizer_2": write_clip_tokenizer},
        seed=seed,
    )


def _write_processor(folder: Path) -> str:
    """Write a `Qwen2VLProcessor`, a tokenizer and an image processor, and return its class name."""
    write_qwen_tokenizer(folder)
    reading = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "merge_size": 2,
        "patch_size": _PATCH_PX,
        "processor_class": "Qwen2VLProcessor",
        "temporal_patch_size": 2,
    }
    write_json(folder / "preprocessor_config.json", reading)
    return "Qwen2VLProcessor"


def _transformer() -> Any:
    import torch
    from diffusers import Kandinsky5Transformer3DModel

    made: Any = Kandinsky5Transformer3DModel(
        in_visual_dim=_CHANNELS,
        in_text_dim=TEXT_WIDTH,
        in_text_dim2=TEXT_WIDTH,
        time_dim=32,
        out_visual_dim=_CHANNELS,
        model_dim=32,
        ff_dim=64,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
    )
    with torch.no_grad():  # zeros until they are trained
        for name, weight in made.named_parameters():
            if "modulation" in name:
                weight.normal_(std=0.1)
    return made
