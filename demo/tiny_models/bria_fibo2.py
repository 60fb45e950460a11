"""A tiny Bria FIBO 2 with random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from demo.tiny_models.flux2 import flux2_vae
from demo.tiny_models.language import qwen3_vl, write_qwen_tokenizer
from demo.tiny_models.parts import assemble, flow_schedule, write_json

_TEXT_WIDTH = 16
_TEXT_LAYERS = 36
"""Layers of the language model: the pipeline uses hidden states up to 35."""

_CHANNELS = 8


def make_tiny_bria_fibo2(folder: Path, *, seed: int = 0) -> None:
    """Write the model as a diffusers folder; equal arguments give equal bytes.

    `BriaFibo2Pipeline.from_pretrained(folder)` loads it if torchvision is installed, which the image
    processor requires. It draws pictures of 64x64 pixels.

    Args:
        folder: Destination, created with its parents; existing files are replaced.
        seed: Seed of the random weights.
    """
    language_model = partial(
        qwen3_vl, "Qwen3VLForConditionalGeneration", width=_TEXT_WIDTH, layers=_TEXT_LAYERS
    )
    assemble(
        folder,
        "BriaFibo2Pipeline",
        {
            "vae": flux2_vae,
            "transformer": _transformer,
            "text_encoder": language_model,
            "scheduler": partial(flow_schedule, use_dynamic_shifting=True),
        },
        tokenizers={"processor": _write_processor},
        seed=seed,
    )


def _write_processor(folder: Path) -> str:
    """Write a `Qwen3VLProcessor` with tokenizer and image processors; return its class name."""
    write_qwen_tokenizer(folder)
    settings = {
        "merge_size": 2,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "processor_class": "Qwen3VLProcessor",
    }
    # The published limits of an image's area, by scripts/convert_bria_fibo2_to_diffusers.py of diffusers.
    size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 2048 * 28 * 28}
    images = {**settings, "image_processor_type": "Qwen2VLImageProcessor", "size": size}
    write_json(folder / "preprocessor_config.json", images)
    videos = {**settings, "video_processor_type": "Qwen3VLVideoProcessor"}
    write_json(folder / "video_preprocessor_config.json", videos)
    return "Qwen3VLProcessor"


def _transformer() -> Any:
    """Return a transformer with five injection blocks, as the real model, whose gates are not closed."""
    import torch
    from diffusers import BriaFibo2Transformer2DModel

    made: Any = BriaFibo2Transformer2DModel(
        in_channels=_CHANNELS,
        dim=32,
        n_layers=6,
        n_refiner_layers=1,
        n_heads=2,
        cap_feat_dim=3 * _TEXT_WIDTH,
        injection_layer_ids=(0, 1, 2, 3, 4),
        perceiver_num_layers=1,
        min_num_gist_tokens=8,
        max_num_gist_tokens=16,
        gist_step=4,
        gist_min_text_len=16,
        gist_max_text_len=64,
        axes_dims=(4, 6, 6),
        axes_lens=(32, 128, 128),
    )
    with torch.no_grad():
        for block in made.layers[:5]:
            block.cross_attn_gate.fill_(1.0)
    return made
